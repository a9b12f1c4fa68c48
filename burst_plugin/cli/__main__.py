"""The entry point of `python -m burst_plugin.cli`, which runs the command `burst`."""

from burst_plugin.cli.main import main

raise SystemExit(main())
