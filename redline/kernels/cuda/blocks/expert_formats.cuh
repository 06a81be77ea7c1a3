// The storage formats of the experts' weights (records.py): the values of FORMAT.
#pragma once

#define INT4 1
#define NVFP4 2
#define BF16 3
