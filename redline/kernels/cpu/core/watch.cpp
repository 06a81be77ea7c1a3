// Sets whether the ops of a thread are recorded.
#include "core/watch.h"

__thread WatchCall redline_watching = {};

extern "C" void redline_watch(const WatchCall& call) { redline_watching = call; }
