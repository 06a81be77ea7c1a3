// What the blocks of several ranks, each on a chip of its own, tell one another: words of float32 partial sums.
//
// Every rank has an inbox, which all others can write: [site][source rank][room words]. A thread sends its word to the
// same place of every other rank's inbox, under its own rank, and reads what the others have sent to its own. A word that
// nobody has sent is minus zero, which no sum is sent as; whoever has read a word makes it unsent again. There are no
// flags, no counters, and no fence: a word is its own sign that it has come.
//
// Two sites, used in turn, are enough. A rank sends to a site again only after it has read, at the other site, what every
// rank sent there later; and a rank sends that only once the grid that read the first site has ended (a kernel sends
// behind `wait_for_previous_grid`), so its words there are unsent again.
//
// Many words go in two shots (SHOTS 2): to the one rank that owns their place, which adds them up and sends all others
// the sum. That is two ways instead of one, and 2 (RANKS - 1) / RANKS words a place that leave a rank, not RANKS - 1. No
// room is needed for it: at a place nobody but its owner is sent parts, and nobody but its owner sends sums. And two sites
// are still enough: the owner sends the sum that a rank reads after it has read what every rank sent.
//
// The wait is bounded: a rank whose words do not come within control[0] nanoseconds is written to control[1], plus one,
// and from then on nobody waits: what is read is NaN. A sum is waited for twice as long, since its owner waits itself:
// who is named is who has sent nothing, not who waits for it.
//
// Macros: RANKS; SHOTS, 1 unless it is given.
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
constexpr u32 TRIES = 4096;  // of a read, between two looks at the clock
#endif

struct Ranks {
    u32* inbox[RANKS];  // of this site, as this chip sees them
    u32* mine;
    u64* control;
    u32 rank, room;
};

// A launch has the inboxes' addresses among its arguments, `inbox_0` to `inbox_7`: nothing has to be loaded to find them.
// `first`: of the site's words in an inbox.
template <class Launch>
FN Ranks ranks_of(const Launch& a, u64 first) {
    const u64 inboxes[8] = {a.inbox_0, a.inbox_1, a.inbox_2, a.inbox_3, a.inbox_4, a.inbox_5, a.inbox_6, a.inbox_7};
    Ranks r;
    r.control = a.control, r.rank = a.rank, r.room = a.room;
    u64 mine = 0;  // chosen by its bits: the compiler makes an array in memory of a choice by number
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

// To this place of one other rank's inbox.
template <class Words>
FN void send_to(const Ranks& r, u32 to, u32 place, Words v) {
    v = sent(v);
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        if (i == to) store_system(r.inbox[i] + (u64)r.rank * r.room + place, v);
    }
}

// To this place of every other rank's inbox.
template <class Words>
FN void send(const Ranks& r, u32 place, Words v) {
    v = sent(v);
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        if (i != r.rank) store_system(r.inbox[i] + (u64)r.rank * r.room + place, v);
    }
}

// patience: how many times control[0] may pass.
FN bool is_lost(const Ranks& r, u32 source, u64& since, u32 patience = 1) {
    u64 now = nanoseconds();
    if (since == 0) since = now;
    if (load_system_64(r.control + 1)) return true;
    if (now - since < patience * load_system_64(r.control)) return false;
    store_system_64(r.control + 1, source + 1);
    return true;
}

// What all other ranks have sent to `count` of these places: came[n][source]. All of it is asked for at once, and what has
// not come again; then it is unsent again.
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

// What one rank has sent to `count` of these places. patience: as `is_lost` has it.
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

// A rank's part of a sum, to whoever adds it up. owner: of the place, the same on all ranks; what it is matters for SHOTS 2.
template <class Words>
FN void send_part(const Ranks& r, u32 owner, u32 place, Words v) {
    if (SHOTS == 1) send(r, place, v);
    else if (owner != r.rank) send_to(r, owner, place, v);
}

// The sums of the parts that all ranks have sent to `count` of these places, this rank's `words` among them, in the order
// of ranks: the same bits on all.
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
