"""`python -m burst_plugin.cli`."""

from burst_plugin.cli.main import main

raise SystemExit(main())
