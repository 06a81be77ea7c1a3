// How the experts' weights are stored (records.py): what FORMAT may be.
#pragma once

#define INT4 1
#define NVFP4 2
#define BF16 3
