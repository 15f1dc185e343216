"""The commands of `stof`, one a file: `add_command` adds its parser, and `run` of what that parses runs it."""
