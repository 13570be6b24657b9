// NCCL between processes of one machine, over sockets. Operations run on the streams they are
// queued on and wait for their peers there. If a peer is gone they hang until the communicator is
// aborted. Aborting a communicator waits for the device, as freeing its memory may; in a group
// (from NCCL 2.22 on) it waits only after all communicators of the group are aborted.
//
// As in NCCL's non-blocking mode, calls return "in progress", and an asynchronous state reports
// when communicators are ready. Messages of a communicator are matched by their order alone. Two
// ranks on one device are refused unless NCCL_HOSTID distinguishes them. If a peer is gone, NCCL
// may report it or not, depending on the connection; the stand-in reports it with
// STANDIN_NCCL_REMOTE_ERROR=1. Using a communicator after it was aborted, or freeing it while the
// program exits, ends the program.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "device.hpp"
#include "narrow.hpp"
#include "ranks.hpp"

namespace standin {

namespace {

struct Id {
    char internal[128];
};

/// Handles that the program may use. A library might crash at the next use of a freed handle; the
/// stand-in always reports it.
struct Handles {
    std::mutex mutex;
    std::set<void *> live;
    /// Number of communicators that are being freed.
    std::atomic<int> freeing{0};
    std::atomic<bool> unloaded{false};
};

Handles &handles() {
    static auto *of_process = new Handles;
    return *of_process;
}

[[noreturn]] void misused(const char *how) {
    std::fprintf(stderr, "stand-in for NCCL: %s\n", how);
    std::abort();
}

void *handle_of(const std::shared_ptr<Comm> &comm) {
    void *handle = new SharedComm(comm);
    std::lock_guard<std::mutex> lock(handles().mutex);
    handles().live.insert(handle);
    return handle;
}

SharedComm &comm_of(void *handle) {
    if (handles().unloaded) misused("used after the program began to exit");
    std::lock_guard<std::mutex> lock(handles().mutex);
    if (!handles().live.count(handle)) misused("used after abort");
    return *static_cast<SharedComm *>(handle);
}

/// The communicator of a handle, which cannot be used afterwards. The handle's memory stays
/// allocated, so that no later handle has its address.
SharedComm take(void *handle) {
    SharedComm comm = std::move(comm_of(handle));
    std::lock_guard<std::mutex> lock(handles().mutex);
    handles().live.erase(handle);
    return comm;
}

/// The effect of a process's end on a library: its threads continue, but the data they use is gone.
struct AtExit {
    ~AtExit() {
        handles().unloaded = true;
        if (handles().freeing) misused("the program exits while communicators are freed");
    }
} at_exit;

struct Operation {
    Kind kind;
    SharedComm comm;
    CUstream stream;
    const char *from;
    char *to;
    size_t count;
    int type, op, peer;
};

size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

template <class T>
T reduced(T a, T b, int op) {
    return op == 0 ? static_cast<T>(a + b) : op == 2 ? (a < b ? b : a) : (b < a ? b : a);
}

template <class T>
void reduce_as(char *into, const char *with, size_t count, int op) {
    for (size_t i = 0; i < count; i++) {
        T a, b;
        std::memcpy(&a, into + i * sizeof(T), sizeof(T));
        std::memcpy(&b, with + i * sizeof(T), sizeof(T));
        a = reduced(a, b, op);
        std::memcpy(into + i * sizeof(T), &a, sizeof(T));
    }
}

/// 16-bit floats are rounded at every step, as NCCL does.
template <class Narrow>
void reduce_narrow(char *into, const char *with, size_t count, int op, Narrow (*narrow)(float)) {
    for (size_t i = 0; i < count; i++) {
        Narrow a, b;
        std::memcpy(&a, into + 2 * i, 2);
        std::memcpy(&b, with + 2 * i, 2);
        a = narrow(reduced(emulator_float(a), emulator_float(b), op));
        std::memcpy(into + 2 * i, &a, 2);
    }
}

void reduce_into(char *into, const char *with, size_t count, int type, int op) {
    switch (type) {
    case 1:
        return reduce_as<uint8_t>(into, with, count, op);
    case 3:
        return reduce_as<uint32_t>(into, with, count, op);
    case 4:
        return reduce_as<int64_t>(into, with, count, op);
    case 7:
        return reduce_as<float>(into, with, count, op);
    case 8:
        return reduce_as<double>(into, with, count, op);
    case 6:
        return reduce_narrow<f16>(into, with, count, op, emulator_f16);
    case 9:
        return reduce_narrow<bf16>(into, with, count, op, emulator_bf16);
    default:
        fault("NCCL: a type that is not summed here");
    }
}

bool collective(const Operation &o) {
    Comm &comm = *o.comm;
    const size_t bytes = o.count * size_of(o.type);
    const bool is_root = comm.rank == o.peer;
    const size_t apart = o.kind == Kind::ReduceScatter ? bytes : 0;
    // The simplest way: every rank receives everything.
    auto all = exchange(comm, o.kind, bytes, o.from, apart);
    if (all.empty()) return false;
    switch (o.kind) {
    case Kind::AllGather:
        for (size_t peer = 0; peer < all.size(); peer++)
            std::memcpy(o.to + peer * bytes, all[peer].data(), bytes);
        return true;
    case Kind::Broadcast:
        std::memcpy(o.to, all[static_cast<size_t>(o.peer)].data(), bytes);
        return true;
    default:
        break;
    }
    for (size_t peer = 1; peer < all.size(); peer++)
        reduce_into(all[0].data(), all[peer].data(), o.count, o.type, o.op);
    if (o.kind != Kind::Reduce || is_root) std::memcpy(o.to, all[0].data(), bytes);
    return true;
}

/// Sends and receives of one group. None waits for another.
bool messages(const std::vector<Operation> &group) {
    std::atomic<bool> well{true};
    std::map<std::pair<int, Kind>, std::vector<const Operation *>> lines;
    for (const Operation &o : group) lines[{o.peer, o.kind}].push_back(&o);
    std::vector<std::thread> threads;
    for (auto &line : lines) {
        const int peer = line.first.first;
        Comm &comm = *group[0].comm;
        if (peer == comm.rank) {
            // Messages of a rank to itself are received in the order of sending.
            if (line.first.second == Kind::Recv) continue;
            auto &receives = lines[{peer, Kind::Recv}];
            for (size_t i = 0; i < line.second.size() && i < receives.size(); i++)
                std::memmove(receives[i]->to, line.second[i]->from,
                    line.second[i]->count * size_of(line.second[i]->type));
            continue;
        }
        threads.emplace_back([&comm, &line, &well, peer] {
            const int socket = comm.peers[static_cast<size_t>(peer)];
            for (const Operation *o : line.second) {
                const size_t bytes = o->count * size_of(o->type);
                const bool done = o->kind == Kind::Send
                                      ? send_message(socket, Kind::Send, o->from, bytes)
                                      : receive_message(socket, Kind::Send, o->to, bytes);
                if (done) continue;
                comm.lose_peer();
                well = false;
                return;
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    return well;
}

thread_local int depth = 0;
thread_local std::vector<Operation> grouped;
/// Communicators that were aborted in a group.
thread_local std::vector<SharedComm> aborted;

/// The version to report; later versions behave the same here.
int version() {
    static const int number = [] {
        const char *text = std::getenv("STANDIN_NCCL_VERSION");
        return text ? std::atoi(text) : 22900;
    }();
    return number;
}

/// Frees communicators that were aborted. Freeing memory may wait for all work on the device.
void reclaim(const std::vector<SharedComm> &comms) {
    if (comms.empty()) return;
    handles().freeing++;
    for (const SharedComm &comm : comms)
        while (comm->launching) std::this_thread::sleep_for(std::chrono::microseconds(100));
    Stream::wait_for_all();
    // Long enough to notice what the program does in the meantime.
    if (tells_of_peers()) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    handles().freeing--;
}

/// Queues an operation of `comm` without waiting for room in its stream's queue. As in NCCL's
/// non-blocking mode, a separate thread waits.
int launch(const SharedComm &comm, Stream &stream, std::function<void()> operation) {
    if (stream.has_room()) {
        stream.queue(CU_GRAPH_NODE_TYPE_KERNEL, std::move(operation));
        return Success;
    }
    comm->launching++;
    comm->change(Success, InProgress);
    std::thread([comm, &stream, operation = std::move(operation)] {
        stream.queue(CU_GRAPH_NODE_TYPE_KERNEL, operation);
        comm->change(InProgress, Success);
        comm->launching--;
    }).detach();
    return InProgress;
}

/// Queues the operations of a group, as one operation of its stream for each communicator.
int flush() {
    std::vector<Operation> all = std::move(grouped);
    grouped.clear();
    int result = Success;
    while (!all.empty()) {
        std::vector<Operation> mine, others;
        for (Operation &o : all) (o.comm == all[0].comm ? mine : others).push_back(o);
        const int launched = launch(mine[0].comm, stream_of(mine[0].stream), [mine] {
            const SharedComm comm = mine[0].comm;
            std::vector<Operation> between;
            bool well = true;
            for (const Operation &o : mine) {
                if (o.kind == Kind::Send || o.kind == Kind::Recv) between.push_back(o);
                else well = well && collective(o);
            }
            if (well && !between.empty()) well = messages(between);
            if (!well) comm->hang();
        });
        if (launched != Success) result = launched;
        all = std::move(others);
    }
    return result;
}

int add(Operation operation) {
    const int state = operation.comm->state;
    if (state != Success) return state == InProgress ? InvalidUsage : state;
    grouped.push_back(std::move(operation));
    return depth == 0 ? flush() : Success;
}

void start(const SharedComm &comm) {
    CUdevice device = 0;
    cuCtxGetDevice(&device);
    std::thread([comm, device] { connect(comm, device); }).detach();
}

} // namespace

} // namespace standin

using namespace standin;

extern "C" {

int ncclGetVersion(int *version) {
    *version = standin::version();
    return Success;
}

const char *ncclGetErrorString(int result) {
    static const char *const texts[] = {"no error", "unhandled cuda error",
        "unhandled system error", "internal error", "invalid argument", "invalid usage",
        "remote process exited or there was a network error", "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(void *comm) { return comm ? comm_of(comm)->error.c_str() : ""; }

int ncclGetUniqueId(Id *id) {
    static std::atomic<uint64_t> made{0};
    std::memset(id, 0, sizeof *id);
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    std::snprintf(id->internal, sizeof id->internal, "standin-%d-%lld-%llu", getpid(),
        static_cast<long long>(now), static_cast<unsigned long long>(made++));
    return Success;
}

int ncclCommInitRankConfig(void **handle, int size, Id id, int rank, void *) {
    if (const char *text = std::getenv("STANDIN_NCCL_ABSENT"); text && std::atoi(text) == rank)
        return UnhandledCudaError;
    auto comm = std::make_shared<Comm>();
    comm->name = id.internal;
    comm->rank = rank;
    comm->size = size;
    *handle = handle_of(comm);
    start(comm);
    return InProgress;
}

int ncclCommSplit(void *parent_handle, int color, int key, void **handle, void *) {
    SharedComm parent = comm_of(parent_handle);
    if (parent->state != Success) return InvalidUsage;
    parent->state = InProgress;
    const uint64_t number = parent->splits++;
    CUdevice device = 0;
    cuCtxGetDevice(&device);
    std::thread([=] {
        const int mine[2] = {color, key};
        auto all = exchange(
            *parent, Kind::AllGather, sizeof mine, reinterpret_cast<const char *>(mine), 0);
        if (all.empty()) return;
        auto comm = std::make_shared<Comm>();
        comm->size = 0;
        comm->name = parent->name + "/" + std::to_string(number) + "." + std::to_string(color);
        for (int rank = 0; rank < parent->size; rank++) {
            int theirs[2];
            std::memcpy(theirs, all[static_cast<size_t>(rank)].data(), sizeof theirs);
            if (theirs[0] != color) continue;
            comm->size++;
            if (theirs[1] < key || (theirs[1] == key && rank < parent->rank)) comm->rank++;
        }
        *handle = color < 0 ? nullptr : handle_of(comm);
        parent->state = Success;
        if (color >= 0) connect(comm, device);
    }).detach();
    return InProgress;
}

int ncclCommGetAsyncError(void *handle, int *result) {
    *result = comm_of(handle)->state;
    return Success;
}

int ncclCommAbort(void *handle) {
    const SharedComm comm = take(handle);
    comm->abort();
    // Before 2.22 a group had no effect.
    if (depth > 0 && version() >= 22200) aborted.push_back(comm);
    else reclaim({comm});
    return Success;
}

int ncclCommDestroy(void *handle) {
    take(handle);
    return Success;
}

int ncclGroupStart() {
    depth++;
    return Success;
}

int ncclGroupEnd() {
    if (--depth > 0) return Success;
    const int result = flush();
    reclaim(std::exchange(aborted, {}));
    return result;
}

int ncclAllReduce(
    const char *from, char *to, size_t count, int type, int op, void *comm, CUstream stream) {
    return add({Kind::AllReduce, comm_of(comm), stream, from, to, count, type, op, 0});
}

int ncclAllGather(const char *from, char *to, size_t count, int type, void *comm, CUstream stream) {
    return add({Kind::AllGather, comm_of(comm), stream, from, to, count, type, 0, 0});
}

int ncclReduceScatter(
    const char *from, char *to, size_t count, int type, int op, void *comm, CUstream stream) {
    return add({Kind::ReduceScatter, comm_of(comm), stream, from, to, count, type, op, 0});
}

int ncclBroadcast(
    const char *from, char *to, size_t count, int type, int root, void *comm, CUstream stream) {
    return add({Kind::Broadcast, comm_of(comm), stream, from, to, count, type, 0, root});
}

int ncclReduce(const char *from, char *to, size_t count, int type, int op, int root, void *comm,
    CUstream stream) {
    return add({Kind::Reduce, comm_of(comm), stream, from, to, count, type, op, root});
}

int ncclSend(const char *from, size_t count, int type, int peer, void *comm, CUstream stream) {
    return add({Kind::Send, comm_of(comm), stream, from, nullptr, count, type, 0, peer});
}

int ncclRecv(char *to, size_t count, int type, int peer, void *comm, CUstream stream) {
    return add({Kind::Recv, comm_of(comm), stream, nullptr, to, count, type, 0, peer});
}

} // extern "C"
