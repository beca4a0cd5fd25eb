"""Values that stay on the devices between launches, and their host side.

- `device_value`: the value of a variable on the devices. Read this one first.
- `host_variable`: the variable as the host sees it, never stale, and its initial value. `host_handles`: host functions
  that use it.
- `random_numbers`: the state that random ops draw from, and the numbers that TensorFlow's kernels draw.
- `host_memory`: the memory in which the host keeps large values.
"""
