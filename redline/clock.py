"""The clocks of Redline: the whole package reads the time and sleeps through this module, so that a test can set them.

Call these through the module (`clock.monotonic()`), since a test replaces the module's attributes. Code that reads the
time in a loop takes a clock as a parameter; the parameter's default is one of these.
"""

import time

monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
perf_counter, perf_counter_ns = time.perf_counter, time.perf_counter_ns
process_time, thread_time = time.process_time, time.thread_time
now, now_ns = time.time, time.time_ns  # since 1970-01-01 UTC
sleep = time.sleep
gmtime, strftime = time.gmtime, time.strftime
