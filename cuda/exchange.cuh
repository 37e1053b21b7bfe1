// What ranks of one model tell each other: how it is written, waited for and summed. The kernels are in exchange.cu.
//
// A word that matters to others comes with the epoch it belongs to, in one 8-byte store: whoever finds the epoch has the word, so
// nothing need be fenced. There are two inboxes, for even and odd epochs. Every sum needs something of every rank, so a rank that
// has the sum of epoch e - 1 knows that all others have begun it and so have read all of e - 2, whose inbox it may write again.
// Epochs come round after 2^32 sums; only a word that had waited unread since the very same one would be taken for a new one.
//
// Memory of other ranks goes through `Wire`, so that threads of a CPU can be the ranks (test/exchange_ranks.cpp).
#pragma once

#include <cstdint>

#ifndef RWKV_HOST
#include "launch.cuh"
#define RWKV_SHARED __device__ __forceinline__
#define RWKV_SPINS 4096  // between two looks at the clock
#else
#define RWKV_SHARED inline
#define RWKV_SPINS 16
#endif

namespace rwkv {

constexpr int MAX_RANKS = 8;
constexpr int MAX_EXCHANGE_BLOCKS = 128;  // that wait for those of the same number elsewhere
constexpr int FLAG_SETS = 3;              // two of a large sum, one of the logits

enum Trouble : int32_t { SUM = 1, LARGE_SUM = 2, IDS = 3, LOGITS = 4 };  // what was waited for in vain

// Known to a rank of all: addresses of memory on every rank's device. Mirrored by `ExchangeArgs` in
// rwkv_batch/kernels/tensor_parallel/exchange.py.
struct Ranks {
    int32_t rank, count;
    uint64_t* inbox[MAX_RANKS];  // [2, MAX_RANKS, words]: by parity of the epoch and by sender; a word below, its epoch above
    uint64_t* ids[MAX_RANKS];    // [rows]: ids from rank 0, and the step
    uint32_t* flags[MAX_RANKS];  // [FLAG_SETS, MAX_EXCHANGE_BLOCKS, MAX_RANKS]: by sender
    uint32_t* step;              // steps that this rank has begun
    int32_t* trouble;            // [4] in the host's memory: what was waited for, the rank that waited, who was missing, the epoch
    uint64_t patience;           // nanoseconds to wait for others
    int64_t words;               // of an inbox for each sender
};

struct Packet {
    uint64_t word[2];  // two words of four bytes, each with its epoch
};

// The last step whose epochs, `sums` each, fit into 32 bits.
inline uint32_t last_step(int sums) { return 0xffffffffu / uint32_t(sums) - 1; }
RWKV_SHARED uint64_t packed(uint32_t word, uint32_t epoch) { return uint64_t(epoch) << 32 | word; }
RWKV_SHARED bool has(uint64_t word, uint32_t epoch) { return uint32_t(word >> 32) == epoch; }

RWKV_SHARED uint64_t* inbox_of(const Ranks& ranks, int owner, int sender, uint32_t epoch) {
    return ranks.inbox[owner] + (int64_t(epoch & 1) * MAX_RANKS + sender) * ranks.words;
}
RWKV_SHARED uint32_t* flag_of(const Ranks& ranks, int owner, int set, int block, int sender) {
    return ranks.flags[owner] + (set * MAX_EXCHANGE_BLOCKS + block) * MAX_RANKS + sender;
}

// Tries `missing`, which tells as bits which ranks something is still missing of, until none is. Ends the kernel, and leaves word of
// it, when that takes longer than a living rank could.
template <class Wire, class Missing>
RWKV_SHARED void wait_for_all(const Ranks& ranks, Trouble what, uint32_t epoch, Missing missing) {
    uint64_t begun = 0;
    for (uint32_t spins = 1;; spins++) {
        const uint32_t late = missing();
        if (!late) return;
        if (spins % RWKV_SPINS) continue;
        const uint64_t now = Wire::now();
        if (!begun) begun = now;
        if (now - begun > ranks.patience) {
            Wire::give_up(ranks.trouble, what, ranks.rank, late, epoch);
            return;  // on a CPU
        }
    }
}

// Sends a rank's piece of a sum, two words, to all others: the nearest in rank first, so that all links are busy from the start.
template <int MOST, class Wire>
RWKV_SHARED void send_piece(const Ranks& ranks, int64_t piece, const uint32_t (&words)[2], uint32_t epoch) {
    const Packet packet = {{packed(words[0], epoch), packed(words[1], epoch)}};
#pragma unroll
    for (int d = 1; d < MOST; d++) {
        if (d >= ranks.count) break;
        const int to = ranks.rank + d < ranks.count ? ranks.rank + d : ranks.rank + d - ranks.count;
        Wire::store(inbox_of(ranks, to, ranks.rank, epoch) + 2 * piece, packet);
    }
}

// Waits for everybody's piece: `words` has them by rank, one's own as it was given.
template <int MOST, class Wire>
RWKV_SHARED void receive_piece(const Ranks& ranks, int64_t piece, uint32_t (&words)[MOST][2], uint32_t epoch) {
    wait_for_all<Wire>(ranks, SUM, epoch, [&] {
        Packet packets[MOST];
#pragma unroll
        for (int from = 0; from < MOST; from++)  // all asked for at once
            if (from < ranks.count && from != ranks.rank) packets[from] = Wire::load(inbox_of(ranks, ranks.rank, from, epoch) + 2 * piece);
        uint32_t late = 0;
#pragma unroll
        for (int from = 0; from < MOST; from++) {
            if (from >= ranks.count || from == ranks.rank) continue;
            late |= uint32_t(!has(packets[from].word[0], epoch) || !has(packets[from].word[1], epoch)) << from;
            words[from][0] = uint32_t(packets[from].word[0]), words[from][1] = uint32_t(packets[from].word[1]);
        }
        return late;
    });
}

// A block's meeting with those of the same number on all ranks: `thread` < count signals one of them and waits for it. What the
// block's threads wrote before is then seen by the others; all of them must have met before (`__syncthreads`) and meet again behind.
template <class Wire>
RWKV_SHARED void meet(const Ranks& ranks, int set, int block, int thread, uint32_t epoch, Trouble what) {
    if (thread >= ranks.count || thread == ranks.rank) return;
    Wire::signal(flag_of(ranks, thread, set, block, ranks.rank), epoch);
    wait_for_all<Wire>(ranks, what, epoch, [&] {
        return uint32_t(Wire::seen(flag_of(ranks, ranks.rank, set, block, thread)) != epoch) << thread;
    });
}

// The part of `count` units that a rank sums in a large sum.
RWKV_SHARED int64_t share_begin(int64_t count, int rank, int ranks) { return count * rank / ranks; }

}  // namespace rwkv
