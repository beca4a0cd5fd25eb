"""Values that stay on the devices between launches, and their host side.

- `device_value`: the value of a variable on the devices. Read this one first.
- `host_variable`: the variable as the host sees it, never stale. `host_functions`: host functions that use it.
- `initial_values`: the initial values of variables that a body creates.
- `random_numbers`: the state that random ops draw from.
- `host_memory`: the memory in which the host keeps large values.
"""
