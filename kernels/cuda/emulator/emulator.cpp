// The scheduler of the emulator, and the functions that Rust calls. See emulator.hpp.
#include "emulator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
asm(R"(
    .text
    .globl emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, .-emulator_switch
    .section .note.GNU-stack,"",@progbits
    .text
)");
#endif

namespace emulator {

namespace {

constexpr size_t STACK = 256 << 10;
constexpr size_t GUARD = 4096;
/// How long a block may wait for another block.
constexpr auto PATIENCE = std::chrono::seconds(60);
constexpr unsigned char POISON = 0xff; // NaN in f32, bf16 and f16
constexpr unsigned char UNTOUCHED = 0xa5;

/// Entry of every fiber.
void run_thread() {
    Block &b = block();
    b.call(b.function, b.args);
    b.current->done = true;
    b.current->waits = nullptr;
    b.progress++;
    switch_to(b.current->context, b.scheduler);
    std::abort(); // a finished thread is never resumed
}

struct Random {
    uint64_t state;
    uint64_t next() {
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
};

unsigned char *new_stack() {
    void *at = mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        std::fprintf(stderr, "the emulator of GPU kernels finds no memory for stacks\n");
        std::abort();
    }
    // A stack that overflows faults, instead of overwriting another thread's variables.
    mprotect(at, GUARD, PROT_NONE);
    return static_cast<unsigned char *>(at) + GUARD;
}

void describe_deadlock(Block &b) {
    uint32_t waiting = 0, done = 0;
    const Thread *first = nullptr;
    for (uint32_t i = 0; i < b.num_threads; i++) {
        const Thread &t = b.threads[i];
        done += t.done;
        if (!t.done && t.waits) {
            waiting++;
            if (!first) first = &t;
        }
    }
    std::snprintf(b.error, sizeof b.error,
        "block (%u, %u, %u) hangs: %u of %u threads wait, %u have ended; thread %u waits in %s",
        b.index.x, b.index.y, b.index.z, waiting, b.num_threads, done, first ? first->number : 0,
        first ? first->waits : "nothing");
}

void run(Block &b, Order order, uint64_t seed) {
    std::vector<uint32_t> turns(b.num_threads);
    for (uint32_t i = 0; i < b.num_threads; i++)
        turns[i] = order == Order::Backward ? b.num_threads - 1 - i : i;
    Random random{seed};
    const bool ahead = order == Order::WarpByWarp;
    const uint32_t together = ahead ? 32 : b.num_threads;
    uint32_t running = b.num_threads;
    auto alone = std::chrono::steady_clock::now(); // since when this block makes no progress
    while (running > 0) {
        if (order == Order::Shuffled)
            for (uint32_t i = b.num_threads; i > 1; i--)
                std::swap(turns[i - 1], turns[random.next() % i]);
        const uint64_t before = b.progress;
        b.outside = false;
        running = 0;
        for (uint32_t first = 0; first < b.num_threads; first += together) {
            uint64_t seen;
            uint32_t own;
            do {
                seen = b.progress;
                own = 0;
                for (uint32_t i = first; i < std::min(first + together, b.num_threads); i++) {
                    Thread &t = b.threads[turns[i]];
                    if (t.done) continue;
                    if (t.ready && !t.ready(t.ready_of)) {
                        own++;
                        continue;
                    }
                    b.current = &t;
                    switch_to(b.scheduler, t.context);
                    if (b.error[0]) return;
                    own += !t.done;
                }
            } while (ahead && own > 0 && b.progress != seen);
            running += own;
        }
        if (running == 0 || b.progress != before) {
            alone = std::chrono::steady_clock::now();
            continue;
        }
        if (!b.outside || std::chrono::steady_clock::now() - alone > PATIENCE)
            return describe_deadlock(b);
        std::this_thread::yield();
    }
}

} // namespace

Block::~Block() {
    for (const Thread &thread : threads) munmap(thread.stack - GUARD, STACK + GUARD);
    for (const Meeting *meeting : free_meetings) delete meeting;
    for (const auto &open : meetings)
        for (const Meeting *meeting : open) delete meeting;
}

/// The block of this system thread; it lives as long as the thread.
Block &block() {
    static thread_local Block b;
    return b;
}

void yield() {
    Block &b = block();
    switch_to(b.current->context, b.scheduler);
}

void fail(const char *format, ...) {
    Block &b = block();
    va_list list;
    va_start(list, format);
    const int n = std::snprintf(b.error, sizeof b.error,
        "block (%u, %u, %u), thread %u: ", b.index.x, b.index.y, b.index.z, b.current->number);
    std::vsnprintf(b.error + n, sizeof b.error - n, format, list);
    va_end(list);
    for (;;) yield();
}

uint32_t barrier(uint32_t id, uint32_t count, uint32_t brought, const char *what) {
    Block &b = block();
    if (id >= 16 || count == 0 || count > b.num_threads)
        fail("%s: barrier %u of %u threads", what, id, count);
    Barrier &barrier = b.barriers[id];
    const uint64_t generation = barrier.generation;
    barrier.count[generation % 2] += brought;
    b.progress++;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.generation++;
        barrier.count[barrier.generation % 2] = 0;
    } else {
        Barrier *of = &barrier;
        wait_quietly([=] { return of->generation != generation; }, what);
    }
    return barrier.count[generation % 2];
}

void barrier_arrive(uint32_t id, uint32_t count) {
    Block &b = block();
    Barrier &barrier = b.barriers[id % 16];
    b.progress++;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.generation++;
        barrier.count[barrier.generation % 2] = 0;
    }
}

void poison_once(void *memory, size_t bytes) {
    Block &b = block();
    for (const void *seen : b.shared_seen)
        if (seen == memory) return;
    b.shared_seen.push_back(memory);
    std::memset(memory, POISON, bytes);
}

unsigned char *dynamic_shared() {
    Block &b = block();
    if (b.shared_bytes == 0) fail("the launch has no dynamic shared memory");
    return b.shared;
}

void finish_copies(size_t keep) {
    auto &groups = thread().copies;
    // The last group is open: it has not been committed.
    const size_t committed = groups.empty() ? 0 : groups.size() - 1;
    const size_t finish = committed > keep ? committed - keep : 0;
    for (size_t g = 0; g < finish; g++)
        for (const Thread::Copy &copy : groups[g]) {
            std::memcpy(copy.to, copy.from, copy.bytes);
            std::memset(
                static_cast<unsigned char *>(copy.to) + copy.bytes, 0, copy.filled - copy.bytes);
        }
    groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(finish));
}

extern "C" {

/// The kernel `name` of a file's list, or null.
const Kernel *emulator_find(const Kernel *list, const char *name) {
    for (const Kernel *k = list; k; k = k->next)
        if (std::strcmp(k->name, name) == 0) return k;
    return nullptr;
}

/// The number of arguments of a kernel; their sizes go to `sizes`, up to `room`.
uint32_t emulator_arguments(const Kernel *kernel, uint32_t *sizes, uint32_t room) {
    for (uint32_t i = 0; i < kernel->num_args && i < room; i++) sizes[i] = kernel->sizes[i];
    return kernel->num_args;
}

/// Runs block `index` of a launch. Returns false with a message in `error` if the block cannot end.
bool emulator_run_block(const Kernel *kernel, const uint32_t *grid, uint32_t num_threads,
    uint32_t shared_bytes, const uint32_t *index, uint32_t order, uint64_t seed, void **args,
    char *error, size_t error_room) {
    Block &b = block();
    b.index = {index[0], index[1], index[2]};
    b.grid = {grid[0], grid[1], grid[2]};
    b.size = {num_threads, 1, 1};
    b.num_threads = num_threads;
    b.progress = 0;
    b.error[0] = 0;
    b.call = kernel->call;
    b.function = kernel->function;
    b.args = args;
    for (Barrier &barrier : b.barriers) barrier = Barrier();
    b.shared_seen.clear();
    while (b.threads.size() < num_threads) {
        b.threads.emplace_back();
        b.threads.back().stack = new_stack();
    }
    const uint32_t warps = (num_threads + 31) / 32;
    if (b.meetings.size() < warps) b.meetings.resize(warps);
    for (auto &open : b.meetings) { // left over from a block that failed
        b.free_meetings.insert(b.free_meetings.end(), open.begin(), open.end());
        open.clear();
    }
    for (uint32_t i = 0; i < num_threads; i++) {
        Thread &t = b.threads[i];
        t.index = {i, 0, 0};
        t.number = i;
        t.done = false;
        t.waits = nullptr;
        t.ready = nullptr;
        t.copies.clear();
        prepare(t.context, t.stack, STACK, run_thread);
    }
    std::vector<unsigned char> memory(shared_bytes + 2048, UNTOUCHED);
    b.shared = reinterpret_cast<unsigned char *>(
        (reinterpret_cast<uintptr_t>(memory.data()) + 1023) & ~static_cast<uintptr_t>(1023));
    b.shared_bytes = shared_bytes;
    std::memset(b.shared, POISON, shared_bytes);
    run(b, static_cast<Order>(order), seed);
    if (!b.error[0])
        for (unsigned char *at = b.shared + shared_bytes; at < memory.data() + memory.size(); at++)
            if (*at != UNTOUCHED) {
                std::snprintf(b.error, sizeof b.error,
                    "block (%u, %u, %u) writes behind its %u bytes of dynamic shared memory",
                    index[0], index[1], index[2], shared_bytes);
                break;
            }
    if (!b.error[0]) return true;
    std::snprintf(error, error_room, "%s", b.error);
    return false;
}

} // extern "C"

} // namespace emulator
