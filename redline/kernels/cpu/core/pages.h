// The number formats of pages. Products with float32 pages are exact; with other formats their inputs may be rounded to
// bf16.
#pragma once
#include "vec.h"

enum KvType { KV_BF16, KV_FLOAT32, KV_E4M3 };  // as mla.py numbers them

inline bool rounds(int kv_type) { return kv_type != KV_FLOAT32; }

// Calls f(plane) with the pointer type of the format.
template <class F> inline void with_pages(const void* plane, int kv_type, F&& f) {
    if (kv_type == KV_FLOAT32) f((float*)plane);
    else if (kv_type == KV_E4M3) f((e4m3*)plane);
    else f((bf16*)plane);
}
