"""The commands: flags, devices, exit statuses, and what each command does."""
