// Runs CUDA kernels on a CPU, for tests on machines without a GPU.
//
// Every thread of a block is a fiber. It runs until it needs other threads (a barrier, a shuffle, a
// vote), and continues when they have arrived. So each kind of synchronization is a meeting of
// fibers. If some never arrive, the emulator reports an error that says which thread waits where.
// The test chooses the order of turns. If a kernel reads another thread's writes without a barrier
// in between, some order gives different results, or the NaNs that shared memory is filled with
// before a block starts.
//
// A block runs on one system thread, different blocks on several. Kernels must not spin on memory
// without `emulator::wait_until`, or, if they wait for another block, `emulator::wait_outside`.
// They must only wait for blocks that have started.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.hpp"

namespace emulator {

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
};

/// The order in which threads take turns, and blocks run.
enum class Order : uint32_t { Forward, Backward, Shuffled, WarpByWarp };

/// A thread of a block.
struct Thread {
    Dim3 index;
    uint32_t number = 0;
    bool done = false;
    /// Name of the event that it waits for; null while it can run.
    const char *waits = nullptr;
    /// Tests whether the event has happened, if this is possible without giving the thread a turn.
    bool (*ready)(const void *) = nullptr;
    const void *ready_of = nullptr;
    Context context;
    unsigned char *stack = nullptr;
    /// Copies from global to shared memory that were issued and need not have happened yet, by
    /// committed group; the last group is open.
    struct Copy {
        void *to;
        const void *from;
        size_t bytes, filled;
    };
    std::vector<std::vector<Copy>> copies;
};

/// Lanes of a warp that exchange values.
struct Meeting {
    static constexpr size_t ROOM = 256;
    uint32_t mask = 0, arrived = 0, left = 0;
    const char *what = nullptr;
    alignas(16) unsigned char values[32][ROOM];
};

/// A barrier of some threads of a block.
struct Barrier {
    uint32_t arrived = 0;
    uint64_t generation = 0;
    // Sums of the threads' values, by the parity of the generation.
    uint32_t count[2] = {0, 0};
};

/// The block that runs on this system thread.
struct Block {
    Dim3 index, grid, size;
    uint32_t num_threads = 0;
    std::vector<Thread> threads;
    Thread *current = nullptr;
    Context scheduler;
    /// Counts events that let some thread continue. If all threads wait and the count does not
    /// change, they wait for ever.
    uint64_t progress = 0;
    /// Whether a thread waits for another block.
    bool outside = false;
    std::vector<std::vector<Meeting *>> meetings;  // by warp; those that some lane has yet to leave
    std::vector<Meeting *> free_meetings;
    Barrier barriers[16];
    std::vector<const void *> shared_seen;
    unsigned char *shared = nullptr;
    size_t shared_bytes = 0;
    char error[512] = {0};
    void (*call)(const void *function, void **args) = nullptr;
    const void *function = nullptr;
    void **args = nullptr;

    Block() = default;
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    ~Block();
};

Block &block();

/// Ends the launch with this message.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/// Lets the other threads of the block run.
void yield();

inline Thread &thread() { return *block().current; }

/// Lets other threads run until `ready`.
template <class F>
inline void wait_until(F ready, const char *what) {
    Block &b = block();
    Thread *self = b.current;
    while (!ready()) {
        self->waits = what;
        yield();
    }
    if (self->waits) b.progress++;
    self->waits = nullptr;
}

/// As `wait_until`, if another block makes it ready.
template <class F>
inline void wait_outside(F ready, const char *what) {
    Block &b = block();
    wait_until([&] { return ready() || (b.outside = true, false); }, what);
}

/// As `wait_until`, for a `ready` without side effects: the thread gets no turn before.
template <class F>
inline void wait_quietly(F ready, const char *what) {
    if (ready()) return;
    Block &b = block();
    Thread *self = b.current;
    self->waits = what;
    self->ready_of = &ready;
    self->ready = [](const void *of) { return (*static_cast<const F *>(of))(); };
    yield();
    self->ready = nullptr;
    self->waits = nullptr;
    b.progress++;
}

/// Lets the lanes of `mask` meet, each with its value; then calls `read` with the values by lane.
template <class T, class F>
inline auto exchange(uint32_t mask, const char *what, const T &mine, F read) {
    static_assert(sizeof(T) <= Meeting::ROOM && std::is_trivially_copyable<T>::value, "a plain value of at most 256 bytes");
    Block &b = block();
    const uint32_t warp = b.current->number / 32, lane = b.current->number % 32;
    if (!(mask >> lane & 1)) fail("lane %u calls %s with mask %08x, in which it is not", lane, what, mask);
    auto &open = b.meetings[warp];
    Meeting *meeting = nullptr;
    for (Meeting *m : open)
        if (m->mask == mask && !(m->arrived >> lane & 1)) {
            meeting = m;
            break;
        }
    if (!meeting) {
        if (b.free_meetings.empty()) b.free_meetings.push_back(new Meeting);
        meeting = b.free_meetings.back();
        b.free_meetings.pop_back();
        meeting->mask = mask;
        meeting->arrived = meeting->left = 0;
        meeting->what = what;
        open.push_back(meeting);
    }
    if (meeting->what != what && std::strcmp(meeting->what, what) != 0)
        fail("lane %u of warp %u calls %s where others of its mask call %s", lane, warp, what, meeting->what);
    std::memcpy(meeting->values[lane], &mine, sizeof(T));
    meeting->arrived |= 1u << lane;
    b.progress++;
    wait_quietly([=] { return meeting->arrived == mask; }, what);
    struct Values {
        const Meeting &m;
        T operator[](uint32_t from) const {
            T value;
            std::memcpy(&value, m.values[from & 31], sizeof(T));
            return value;
        }
    };
    auto result = read(Values{*meeting});
    meeting->left |= 1u << lane;
    if (meeting->left == mask) {
        for (size_t i = 0; i < open.size(); i++)
            if (open[i] == meeting) {
                open[i] = open.back();
                open.pop_back();
                break;
            }
        b.free_meetings.push_back(meeting);
    }
    return result;
}

/// Barrier `id` of `count` threads; the result is the sum of their values.
uint32_t barrier(uint32_t id, uint32_t count, uint32_t brought, const char *what);

/// Arrives at barrier `id` without waiting for it.
void barrier_arrive(uint32_t id, uint32_t count);

/// Fills static shared memory with NaNs, once per block.
void poison_once(void *memory, size_t bytes);

/// Dynamic shared memory of the block.
unsigned char *dynamic_shared();

/// Performs the pending copies of this thread, except the last `keep` committed groups.
void finish_copies(size_t keep);

/// A kernel, in the list of its file.
struct Kernel {
    const char *name;
    const void *function;
    void (*call)(const void *function, void **args);
    const uint32_t *sizes;  // of the arguments
    uint32_t num_args;
    Kernel *next;
};

template <class... A>
struct Arguments {
    static constexpr uint32_t SIZES[sizeof...(A) + 1] = {static_cast<uint32_t>(sizeof(A))..., 0};

    template <size_t... I>
    static void call_with(void (*function)(A...), void **args, std::index_sequence<I...>) {
        function(*static_cast<std::remove_cv_t<A> *>(args[I])...);
    }

    static void call(const void *function, void **args) {
        call_with(reinterpret_cast<void (*)(A...)>(const_cast<void *>(function)), args, std::index_sequence_for<A...>());
    }
};

/// Registers a kernel before the program starts.
struct Registered {
    Kernel kernel;

    template <class... A>
    Registered(Kernel *&list, const char *name, void (*function)(A...)) {
        kernel = {name, reinterpret_cast<const void *>(function), Arguments<A...>::call, Arguments<A...>::SIZES, sizeof...(A), list};
        list = &kernel;
    }
};

}  // namespace emulator
