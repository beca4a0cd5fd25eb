"""Values that stay on the devices between launches, and their host side.

- `device_value`: the value of a variable on the devices. Read this one first.
- `host_variable`: the variable on the host, never stale. `host_functions`: functions on the host that use it.
- `initial_values`: what a variable that a body creates begins with.
- `random_numbers`: what random ops draw from.
- `host_memory`: where the host keeps large values.
"""
