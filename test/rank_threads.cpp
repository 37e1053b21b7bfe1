// The ranks of cuda/exchange.cu as threads of a CPU. What they send each other arrives late and in any order, word by word.
#define RWKV_HOST
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Place {
    unsigned x;
};
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
static thread_local std::barrier<>* block_meets;
static void __syncthreads() { block_meets->arrive_and_wait(); }
static void release_next() {}
static void wait_for_previous() {}

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct __half2 {
    _Float16 x, y;
};
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
static __half2 __float22half2_rn(float2 f) { return {_Float16(f.x), _Float16(f.y)}; }

#include "../cuda/exchange.cuh"

namespace rwkv {
namespace {

struct GaveUp {};

// What is under way between ranks. One thread delivers it, in any order.
struct Network {
    struct Store {
        void* to;
        uint64_t value;
        int bytes;
    };
    std::mutex mutex;
    std::vector<Store> under_way;
    uint32_t state = 1;
    std::atomic<bool> ends{false};

    uint32_t random() { return (state = state * 1664525u + 1013904223u) >> 8; }
    void send(void* to, uint64_t value, int bytes) {
        const std::lock_guard lock(mutex);
        under_way.push_back({to, value, bytes});
    }
    void deliver() {
        while (!ends) {
            {
                const std::lock_guard lock(mutex);
                for (int n = random() % 64; n && !under_way.empty(); n--) {
                    std::swap(under_way[random() % under_way.size()], under_way.back());
                    const Store store = under_way.back();
                    under_way.pop_back();
                    if (store.bytes == 8) std::atomic_ref(*static_cast<uint64_t*>(store.to)).store(store.value, std::memory_order_release);
                    else std::atomic_ref(*static_cast<uint32_t*>(store.to)).store(uint32_t(store.value), std::memory_order_release);
                }
            }
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
};
Network* network;

struct Links {
    static void store(uint64_t* to, const Packet& p) { store_word(to + 1, p.word[1]), store_word(to, p.word[0]); }
    static Packet load(const uint64_t* from) { return {{load_word(from), load_word(from + 1)}}; }
    static void store_word(uint64_t* to, uint64_t word) { network->send(to, word, 8); }
    static uint64_t load_word(const uint64_t* from) {
        return std::atomic_ref(*const_cast<uint64_t*>(from)).load(std::memory_order_acquire);
    }
    static void signal(uint32_t* flag, uint32_t epoch) { network->send(flag, epoch, 4); }
    static uint32_t seen(const uint32_t* flag) {
        std::this_thread::yield();
        return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
    }
    static uint64_t now() {
        std::this_thread::sleep_for(std::chrono::microseconds(500));  // others are to run
        return std::chrono::steady_clock::now().time_since_epoch().count();
    }
    static void give_up(int32_t* trouble, Trouble what, int rank, uint32_t late, uint32_t epoch) {
        const int32_t words[] = {what, rank, int32_t(late), int32_t(epoch)};
        static std::mutex one;
        const std::lock_guard lock(one);
        if (!trouble[0]) std::memcpy(trouble, words, sizeof(words));
        throw GaveUp();
    }
};

}  // namespace
}  // namespace rwkv

#include "../cuda/exchange.cu"

namespace {

using namespace rwkv;

struct Plan {
    int32_t ranks, threads, blocks, steps, sums, values, rows, columns;
    int32_t slow, dead, dead_step;  // ranks, -1 = none
    int32_t first_step;             // that ranks count from
    int32_t seed;
    int64_t patience;
};

float value_of(int rank, int step, int number, int i) {
    uint32_t h = uint32_t(rank * 7919 + step * 104729 + number * 1299709 + i * 15485863);
    h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12;
    return float(int(h % 4096) - 2048) / 512.f;
}

struct Memory {
    std::vector<uint64_t> inbox, ids;
    std::vector<uint32_t> flags;
    uint32_t step;
    int32_t trouble[4] = {};
    std::vector<_Float16> part, own, logits;
    std::vector<int64_t> last_ids, slots, tokens;
};

}  // namespace

// Runs steps of `sums` sums each, by turns of both kinds, with ids before and logits behind them. 0 where all came out right; else a
// line of code. `trouble`: [ranks, 4].
extern "C" int run_ranks(const Plan* given, int32_t* trouble) {
    const Plan plan = *given;
    Network net;
    net.state = plan.seed;
    rwkv::network = &net;
    std::vector<Memory> memory(plan.ranks);
    std::vector<Ranks> ranks(plan.ranks);
    Parts parts = {};
    const int64_t words = plan.values / 2;
    for (int r = 0; r < plan.ranks; r++) {
        Memory& m = memory[r];
        m.inbox.resize(2 * MAX_RANKS * words), m.ids.resize(plan.rows);
        m.flags.resize(FLAG_SETS * MAX_EXCHANGE_BLOCKS * MAX_RANKS), m.step = uint32_t(plan.first_step);
        m.part.resize(plan.values), m.own.resize(plan.rows * plan.columns), m.logits.resize(plan.rows * plan.columns * plan.ranks);
        m.last_ids.resize(plan.rows), m.tokens.resize(plan.rows), m.slots.resize(plan.rows);
        for (int i = 0; i < plan.rows; i++) m.slots[i] = i % 5 == 4 ? -1 : plan.rows - 1 - i;
        parts.of[r] = reinterpret_cast<uint4*>(m.part.data());
    }
    for (int r = 0; r < plan.ranks; r++) {
        ranks[r] = {};
        ranks[r].rank = r, ranks[r].count = plan.ranks, ranks[r].patience = plan.patience, ranks[r].words = words;
        ranks[r].step = &memory[r].step, ranks[r].trouble = memory[r].trouble;
        for (int other = 0; other < plan.ranks; other++) {
            ranks[r].inbox[other] = memory[other].inbox.data(), ranks[r].ids[other] = memory[other].ids.data();
            ranks[r].flags[other] = memory[other].flags.data();
        }
    }
    std::atomic<int> wrong{0};
    const auto claim = [&](bool right, int line) {
        int none = 0;
        if (!right) wrong.compare_exchange_strong(none, line);
    };
    const auto rank_thread = [&](int r, int block, int thread, std::barrier<>& own_block, std::barrier<>& all_blocks) {
        Memory& m = memory[r];
        const bool first = block == 0 && thread == 0;
        block_meets = &own_block;
        threadIdx = {unsigned(thread)}, blockIdx = {unsigned(block)}, blockDim = {unsigned(plan.threads)};
        const auto kernel = [&](int blocks, auto run) {
            gridDim = {unsigned(blocks)};
            all_blocks.arrive_and_wait();
            if (block < blocks) run();
            all_blocks.arrive_and_wait();
        };
        const auto half = [](float v) { return _Float16(v); };
        try {
            for (int step = 0; step < plan.steps; step++) {
                if (r == plan.dead && step == plan.dead_step) throw GaveUp();
                if (r == plan.slow && first && step % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                if (r == 0 && first)
                    for (int i = 0; i < plan.rows; i++) m.last_ids[i] = step * 1000 + i;
                kernel(1, [&] { begin_step(ranks[r], r ? nullptr : m.last_ids.data(), m.slots.data(), m.tokens.data(), plan.rows, last_step(plan.sums)); });
                for (int i = 0; first && i < plan.rows; i++)
                    claim(m.tokens[i] == (m.slots[i] < 0 ? 0 : step * 1000 + m.slots[i]), __LINE__);
                for (int number = 0; number < plan.sums; number++) {
                    const int size = (step + number) % 3 ? plan.values : plan.values / 2 / 8 * 8;  // some are shorter
                    for (int i = 0; first && i < size; i++) m.part[i] = half(value_of(r, step, number, i));
                    if ((step + number / 2) % 2)
                        kernel(plan.blocks, [&] { sum_many<4>(ranks[r], parts, size / 8, number, plan.sums); });
                    else
                        kernel(plan.blocks, [&] {
                            sum_few<4>(ranks[r], reinterpret_cast<uint2*>(m.part.data()), size / 4, number, plan.sums);
                        });
                    for (int i = 0; first && i < size; i++) {
                        float sum = 0.f;
                        for (int other = 0; other < plan.ranks; other++) sum += float(half(value_of(other, step, number, i)));
                        claim(m.part[i] == half(sum), __LINE__);
                    }
                }
                const int count = plan.rows * plan.columns, all = plan.columns * plan.ranks;
                for (int i = 0; first && i < count; i++) m.own[i] = half(value_of(r, step, -1, i));
                kernel(plan.blocks, [&] {
                    join_logits(ranks[r], reinterpret_cast<uint4*>(m.own.data()), plan.columns / 8,
                                reinterpret_cast<uint4*>(memory[0].logits.data()), all / 8, r * plan.columns / 8, plan.columns / 8,
                                plan.rows);
                });
                for (int i = 0; first && r == 0 && i < plan.rows * all; i++) {
                    const int row = i / all, of = i % all / plan.columns;
                    claim(m.logits[i] == half(value_of(of, step, -1, row * plan.columns + i % plan.columns)), __LINE__);
                }
            }
        } catch (const GaveUp&) {
            own_block.arrive_and_drop(), all_blocks.arrive_and_drop();
        }
    };
    std::thread delivery([&] { net.deliver(); });
    std::vector<std::unique_ptr<std::barrier<>>> barriers;
    std::vector<std::thread> threads;
    for (int r = 0; r < plan.ranks; r++) {
        barriers.push_back(std::make_unique<std::barrier<>>(plan.blocks * plan.threads));
        std::barrier<>& all_blocks = *barriers.back();
        for (int block = 0; block < plan.blocks; block++) {
            barriers.push_back(std::make_unique<std::barrier<>>(plan.threads));
            std::barrier<>& own_block = *barriers.back();
            for (int thread = 0; thread < plan.threads; thread++)
                threads.emplace_back([&, r, block, thread] { rank_thread(r, block, thread, own_block, all_blocks); });
        }
    }
    for (std::thread& t : threads) t.join();
    net.ends = true;
    delivery.join();
    for (int r = 0; r < plan.ranks; r++) std::memcpy(trouble + 4 * r, memory[r].trouble, sizeof(memory[r].trouble));
    return wrong;
}

extern "C" int ranks_size() { return sizeof(rwkv::Ranks); }
