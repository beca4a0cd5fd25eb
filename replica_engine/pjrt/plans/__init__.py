"""What a compiled program needs on its devices: on those that are there, and on chips that are not.

- `chips`: the names of chips and slices, their memory, and which numbers of devices a slice serves.
- `plan`: `Plan`, what the compiler says of a program: memory, cost, collectives. A table when printed.
- `compiled_text`: reads what only the text of a compiled program tells.
- `absent`: compiles for a chip that is not there, in a child process, and `child`: what that process runs.
"""
