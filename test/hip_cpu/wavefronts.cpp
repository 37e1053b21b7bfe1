// Runs the blocks of a launch on the CPU, one after another; a block's lanes are fibers, which take turns where they meet.
//
// A lane runs until it meets others: at a shuffle or vote those of its group, at a barrier all of its block. So between two
// meetings lanes run in any order, not in step as on a card: what counts on being in step goes wrong here, in one of the two
// orders at least. An error is whatever a wavefront of a card could not do: lanes of one group that meet at different places, a
// barrier that the lanes of one wavefront reach at different places, and lanes that wait for some that never come. Of the votes
// outside its own group of 32 lanes a lane learns nothing it may count on: they are made up.
#include "hip/hip_runtime.h"

#include <csetjmp>
#include <cstdio>
#include <sys/mman.h>
#include <ucontext.h>

namespace card {
namespace {

constexpr int MOST_LANES = 1024, GROUP = 32;  // of a block; whose shuffles and votes the kernels share
constexpr size_t STACK = 512 << 10;

struct Lane {
    ucontext_t entry;
    jmp_buf at;
    char* stack = nullptr;
    bool started = false, ended = false;
    Spot spot{};
    const char* waits = "";
};
struct Group {
    int arrived = 0, turn = 0;
    Spot spot{};
    int waiting[64];
    int words[2][64];  // by turns, for some lanes may still be reading
};

Lane lanes[MOST_LANES];
Group groups[7][MOST_LANES];  // by the logarithm of the width
int ready[MOST_LANES], first_ready, num_ready;  // lanes that can go on, a ring
jmp_buf home;
void (*kernel)(void*);
void* argument;
int current, count, live, at_barrier, wavefront_size = 64;
bool backwards, failed;
hipError_t error = hipSuccess;
char message[256] = "";

[[noreturn]] void switch_to(int next) {
    current = next;
    threadIdx = dim3(next % blockDim.x, next / blockDim.x);
    Lane& lane = lanes[next];
    if (lane.started) _longjmp(lane.at, 1);
    lane.started = true;
    setcontext(&lane.entry);
    __builtin_unreachable();
}

void make_ready(int lane) { ready[(first_ready + num_ready++) % MOST_LANES] = lane; }

// Goes on with a lane that can, or ends the block where none can.
[[noreturn]] void next() {
    if (!num_ready || failed) _longjmp(home, 1);
    num_ready--;
    if (backwards) switch_to(ready[(first_ready + num_ready) % MOST_LANES]);
    const int lane = ready[first_ready];
    first_ready = (first_ready + 1) % MOST_LANES;
    switch_to(lane);
}

void wait(const char* what, Spot at) {
    Lane& lane = lanes[current];
    lane.waits = what, lane.spot = at;
    if (!_setjmp(lane.at)) next();
    lane.waits = "";
}

void fail(const char* what) {
    if (!failed) std::snprintf(message, sizeof(message), "%s (lane %d of block %u, %u)", what, current, blockIdx.x, blockIdx.y);
    failed = true;
    wait("", {});
}

void open_barrier() {
    for (int first = 0; first < count; first += wavefront_size) {
        const Lane* one = nullptr;
        for (int i = first; i < count && i < first + wavefront_size; i++) {
            if (lanes[i].ended) continue;
            if (one && lanes[i].spot != one->spot) return fail("lanes of a wavefront reach a barrier at different places");
            one = &lanes[i];
        }
    }
    at_barrier = 0;
    for (int i = 0; i < count; i++)
        if (i != current && !lanes[i].ended) make_ready(i);
}

void enter() {
    for (;;) {
        kernel(argument);
        lanes[current].ended = true;
        live--;
        if (live && at_barrier == live) open_barrier();
        if (!_setjmp(lanes[current].at)) next();
    }
}

void prepare(Lane& lane) {
    if (!lane.stack)
        lane.stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    getcontext(&lane.entry);
    lane.entry.uc_stack = {};
    lane.entry.uc_stack.ss_sp = lane.stack, lane.entry.uc_stack.ss_size = STACK, lane.entry.uc_link = nullptr;
    makecontext(&lane.entry, enter, 0);
    lane.started = false;
}

void run_block() {
    first_ready = num_ready = 0;
    live = count, at_barrier = 0;
    for (int i = 0; i < count; i++) lanes[i].ended = false, lanes[i].waits = "", make_ready(i);
    if (!_setjmp(home)) next();
    if (!failed && live) {
        int stuck = 0;
        while (lanes[stuck].ended) stuck++;
        std::snprintf(message, sizeof(message), "lane %d of block %u, %u waits for others at a %s for ever", stuck, blockIdx.x,
                      blockIdx.y, lanes[stuck].waits);
        failed = true;
    }
}

}  // namespace

Spot spot(const void* frame, const void* instruction) {
    return {instruction, lanes[current].stack + STACK - static_cast<const char*>(frame)};
}
int lane_id() { return current % wavefront_size; }
int wavefront() { return wavefront_size; }

static Group& group_of(int width) { return groups[__builtin_ctz(width)][current / width]; }

void meet(int width, Spot at) {
    if (width > wavefront_size) return fail("a group is larger than the wavefront");
    Group& group = group_of(width);
    const int size = min(width, count - current / width * width);
    if (group.arrived && group.spot != at) return fail("lanes of a group meet at different places");
    group.spot = at;
    group.waiting[group.arrived++] = current;
    if (group.arrived < size) return wait("shuffle", at);
    group.arrived = 0, group.turn ^= 1;
    for (int i = 0; i < size - 1; i++) make_ready(group.waiting[i]);
}

void barrier(Spot at) {
    lanes[current].spot = at;
    if (++at_barrier < live) return wait("barrier", at);
    open_barrier();
}

int exchange(int word, int source, int width, Spot at) {
    Group& group = group_of(width);
    if (source < 0 || source >= width || current / width * width + source >= count)
        fail("a shuffle reads from a lane that is not there");
    int(&words)[64] = group.words[group.turn];
    words[current % width] = word;
    meet(width, at);
    return words[source];
}

uint64_t ballot(bool vote, Spot at) {
    Group& group = group_of(GROUP);
    int(&words)[64] = group.words[group.turn];
    words[current % GROUP] = vote;
    meet(GROUP, at);
    uint64_t votes = 0;
    for (int i = 0; i < GROUP && current / GROUP * GROUP + i < count; i++) votes |= uint64_t(words[i]) << i;
    const int shift = current / GROUP * GROUP % wavefront_size;
    return votes << shift | (wavefront_size > GROUP ? 0x5a5a5a5aull << (GROUP - shift) : 0);
}

hipError_t launch(dim3 grid, dim3 block, void (*run)(void*), void* what) {
    count = int(block.x * block.y * block.z);
    if (!grid.x || !grid.y || !grid.z || !count || count > MOST_LANES || grid.y > 65535 || grid.z > 65535)
        return error = hipErrorInvalidValue;
    kernel = run, argument = what, gridDim = grid, blockDim = block, failed = false;
    for (int i = 0; i < count; i++)
        if (!lanes[i].stack) prepare(lanes[i]);
    for (unsigned z = 0; z < grid.z && !failed; z++)
        for (unsigned y = 0; y < grid.y && !failed; y++)
            for (unsigned x = 0; x < grid.x && !failed; x++) {
                blockIdx = dim3(x, y, z);
                run_block();
            }
    if (!failed) return hipSuccess;
    for (Lane& lane : lanes)
        if (lane.stack) prepare(lane);  // whose fibers stand in the middle of something
    for (auto& width : groups)
        for (Group& group : width) group.arrived = 0;
    return error = hipErrorLaunchFailure;
}

hipError_t take_error() {
    const hipError_t taken = error;
    error = hipSuccess;
    return taken;
}

}  // namespace card

// The lanes of a wavefront, 32 or 64, and whether lanes that can go on do so in the opposite order.
extern "C" __attribute__((visibility("default"))) void card_set(int wavefront, int backwards) {
    card::wavefront_size = wavefront, card::backwards = backwards;
}
extern "C" __attribute__((visibility("default"))) const char* card_message() { return card::message; }
