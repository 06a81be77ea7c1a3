// Communication among the thread blocks of several ranks, each on its own GPU: words of float32 partial sums.
//
// Every rank has an inbox that all other ranks can write: [site][source rank][room words]. A thread stores its word at
// the same place of every other rank's inbox, in the section of its own rank, and reads from its own inbox what the
// others have sent. Minus zero marks a word that has not been sent; a sum that is minus zero is sent as plus zero. The
// reader of a word resets it to minus zero. No flags, counters or fences are needed, because a word itself shows
// whether it has arrived.
//
// Two sites, used alternately, are enough. A rank sends to a site again only after it has read, at the other site, what
// every rank sent there later; and a rank sends that only after the grid that read the first site has ended (a kernel
// sends after `wait_for_previous_grid`), so that rank has reset its words at the first site.
//
// Large messages use a two-shot all-reduce (SHOTS 2): each rank sends its part to the one rank that owns the place,
// which adds the parts and sends the sum to all others. That is two network latencies instead of one, and a rank sends
// 2 (RANKS - 1) / RANKS words per place instead of RANKS - 1. It needs no further room: at each place only the owner
// receives parts, and only the owner sends sums. Two sites are still enough, because the owner sends the sum that a
// rank reads after it has read the parts of all ranks.
//
// The wait is bounded. If a rank's words do not arrive within control[0] nanoseconds, rank + 1 is written to
// control[1]; from then on no thread waits, and missing words are read as NaN. The timeout of a sum is twice as long,
// because its owner itself waits for parts: so control[1] names the rank that has sent nothing, not a rank that waits
// for it.
//
// Macros: RANKS; SHOTS, by default 1.
#pragma once
#include "core.cuh"

constexpr u32 UNSENT = 0x80000000;  // minus zero
FN u32 sent(u32 v) { return v == UNSENT ? 0 : v; }
FN bool is_unsent(u32 v) { return v == UNSENT; }

#ifndef SHOTS
#define SHOTS 1
#endif

#if RANKS > 1
constexpr u32 LOST = 0x7fffffff;
#ifdef REDLINE_EMULATE
constexpr u32 TRIES = 16;
#else
constexpr u32 TRIES = 4096;  // failed reads between two checks of the clock
#endif

struct Ranks {
    u32* inbox[RANKS];  // the inboxes at this site, by their addresses on this GPU
    u32* mine;
    u64* control;
    u32 rank, room;
};

// A launch has the inboxes' addresses among its arguments, `inbox_0` to `inbox_7`, so no load is needed to find them.
// `first`: index of the site's first word in an inbox.
template <class Launch>
FN Ranks ranks_of(const Launch& a, u64 first) {
    const u64 inboxes[8] = {a.inbox_0, a.inbox_1, a.inbox_2, a.inbox_3, a.inbox_4, a.inbox_5, a.inbox_6, a.inbox_7};
    Ranks r;
    r.control = a.control, r.rank = a.rank, r.room = a.room;
    u64 mine = 0;  // selected with a bit mask: for an array index the compiler would put the array into local memory
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) r.inbox[i] = (u32*)inboxes[i] + first, mine |= inboxes[i] & (0 - (u64)(i == a.rank));
    r.mine = (u32*)mine + first;
    return r;
}

FN u32x2 sent(u32x2 v) { return {sent(v.x), sent(v.y)}; }
FN u32x4 sent(u32x4 v) { return {sent(v.x), sent(v.y), sent(v.z), sent(v.w)}; }
FN bool is_unsent(u32x2 v) { return v.x == UNSENT || v.y == UNSENT; }
FN bool is_unsent(u32x4 v) { return v.x == UNSENT || v.y == UNSENT || v.z == UNSENT || v.w == UNSENT; }
FN void fill_words(u32& v, u32 with) { v = with; }
FN void fill_words(u32x2& v, u32 with) { v = {with, with}; }
FN void fill_words(u32x4& v, u32 with) { v = {with, with, with, with}; }

// Stores to this place of one other rank's inbox.
template <class Words>
FN void send_to(const Ranks& r, u32 to, u32 place, Words v) {
    v = sent(v);
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        if (i == to) store_system(r.inbox[i] + (u64)r.rank * r.room + place, v);
    }
}

// Stores to this place of every other rank's inbox.
template <class Words>
FN void send(const Ranks& r, u32 place, Words v) {
    v = sent(v);
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        if (i != r.rank) store_system(r.inbox[i] + (u64)r.rank * r.room + place, v);
    }
}

// Whether `source` has timed out. patience: the timeout as a multiple of control[0]. since: when the wait began, or 0.
FN bool is_lost(const Ranks& r, u32 source, u64& since, u32 patience = 1) {
    u64 now = nanoseconds();
    if (since == 0) since = now;
    if (load_system_64(r.control + 1)) return true;
    if (now - since < patience * load_system_64(r.control)) return false;
    store_system_64(r.control + 1, source + 1);
    return true;
}

// The words that all other ranks have sent to the first `count` of these places: came[n][source]. All loads are issued
// at once, and repeated until every word has arrived; then all words are reset to unsent.
template <u32 PLACES, class Words>
FN void receive(const Ranks& r, const u32 (&places)[PLACES], u32 count, Words (&came)[PLACES][RANKS]) {
    u64 since = 0;
    for (u32 tries = 1;; tries++) {
        u32 missing = RANKS;
#pragma unroll
        for (u32 n = 0; n < PLACES; n++)
#pragma unroll
            for (u32 i = 0; i < RANKS; i++)
                if (n < count && i != r.rank) load_system(r.mine + (u64)i * r.room + places[n], came[n][i]);
#pragma unroll
        for (u32 n = 0; n < PLACES; n++)
#pragma unroll
            for (u32 i = 0; i < RANKS; i++)
                if (n < count && i != r.rank && is_unsent(came[n][i])) missing = i;
        if (missing == RANKS) break;
        wait_a_little();
        if (tries % TRIES == 0 && is_lost(r, missing, since)) {
#pragma unroll
            for (u32 n = 0; n < PLACES; n++)
#pragma unroll
                for (u32 i = 0; i < RANKS; i++) fill_words(came[n][i], LOST);
            return;
        }
    }
    Words none;
    fill_words(none, UNSENT);
#pragma unroll
    for (u32 n = 0; n < PLACES; n++)
#pragma unroll
        for (u32 i = 0; i < RANKS; i++)
            if (n < count && i != r.rank) store_system(r.mine + (u64)i * r.room + places[n], none);
}

// The words that one rank has sent to the first `count` of these places. patience: see `is_lost`.
template <u32 PLACES, class Words>
FN void receive_from(const Ranks& r, u32 source, const u32 (&places)[PLACES], u32 count, Words (&came)[PLACES], u32 patience) {
    u32* from = r.mine + (u64)source * r.room;
    u64 since = 0;
    for (u32 tries = 1;; tries++) {
        bool missing = false;
#pragma unroll
        for (u32 n = 0; n < PLACES; n++)
            if (n < count) load_system(from + places[n], came[n]);
#pragma unroll
        for (u32 n = 0; n < PLACES; n++) missing |= n < count && is_unsent(came[n]);
        if (!missing) break;
        wait_a_little();
        if (tries % TRIES == 0 && is_lost(r, source, since, patience)) {
#pragma unroll
            for (u32 n = 0; n < PLACES; n++) fill_words(came[n], LOST);
            return;
        }
    }
    Words none;
    fill_words(none, UNSENT);
#pragma unroll
    for (u32 n = 0; n < PLACES; n++)
        if (n < count) store_system(from + places[n], none);
}
template <class Words>
FN Words receive_from(const Ranks& r, u32 source, u32 place) {
    u32 places[1] = {place};
    Words came[1];
    receive_from(r, source, places, 1, came, 1);
    return came[0];
}

FN u32 add_words(u32 a, u32 b) { return as_u32(as_float(a) + as_float(b)); }
FN u32x2 add_words(u32x2 a, u32x2 b) { return {add_words(a.x, b.x), add_words(a.y, b.y)}; }
FN u32x4 add_words(u32x4 a, u32x4 b) {
    return {add_words(a.x, b.x), add_words(a.y, b.y), add_words(a.z, b.z), add_words(a.w, b.w)};
}

// Sends this rank's part of a sum to the ranks that add it up. owner: the rank that owns the place, the same on all
// ranks; only SHOTS 2 uses it.
template <class Words>
FN void send_part(const Ranks& r, u32 owner, u32 place, Words v) {
    if (SHOTS == 1) send(r, place, v);
    else if (owner != r.rank) send_to(r, owner, place, v);
}

// The sums over all ranks at the first `count` of these places; `words` has this rank's parts and receives the sums.
// They are added in the order of ranks, so all ranks get the same bits.
template <u32 PLACES, class Words>
FN void all_reduce_words(const Ranks& r, u32 owner, const u32 (&places)[PLACES], u32 count, Words (&words)[PLACES]) {
    if (SHOTS == 2 && owner != r.rank) return receive_from(r, owner, places, count, words, 2);
    Words came[PLACES][RANKS];
    receive(r, places, count, came);
#pragma unroll
    for (u32 n = 0; n < PLACES; n++) {
        Words own = sent(words[n]);
#pragma unroll
        for (u32 i = 0; i < RANKS; i++) {
            Words v = i == r.rank ? own : came[n][i];
            words[n] = i ? add_words(words[n], v) : v;
        }
        if (SHOTS == 2 && n < count) send(r, places[n], words[n]);
    }
}
template <class Words>
FN Words all_reduce_words(const Ranks& r, u32 owner, u32 place, Words own) {
    u32 places[1] = {place};
    Words words[1] = {own};
    all_reduce_words(r, owner, places, 1, words);
    return words[0];
}
#endif
