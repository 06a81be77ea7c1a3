"""What Ray reads from the environment when it is imported: everything is on loopback, and nothing is reported."""

import os

os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on a desktop: this machine's address is 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
}
