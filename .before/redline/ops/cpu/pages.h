// How pages hold their numbers. Products over float32 pages are exact, over all others they may be rounded to bf16.
#pragma once
#include "vec.h"

enum KvType { KV_BF16, KV_FLOAT32, KV_E4M3 };  // as mla.py numbers them

inline bool rounds(int kv_type) { return kv_type != KV_FLOAT32; }

// f(plane, of its type)
template <class F> inline void with_pages(const void* plane, int kv_type, F&& f) {
    if (kv_type == KV_FLOAT32) f((float*)plane);
    else if (kv_type == KV_E4M3) f((e4m3*)plane);
    else f((bf16*)plane);
}
