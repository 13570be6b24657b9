// NCCL between processes of one machine, over sockets: operations run on the streams they are queued on, wait for their peers there, and
// hang there if a peer is gone, until the communicator is aborted.
//
// As in NCCL's non-blocking mode, calls return "in progress" and an asynchronous state says when communicators are ready. Messages of a
// communicator are matched by their order alone. Two ranks on one device are refused unless NCCL_HOSTID tells them apart.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"

namespace standin {

namespace {

enum Result { Success = 0, UnhandledCudaError = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5, RemoteError = 6, InProgress = 7 };

struct Id {
    char internal[128];
};

/// What ranks tell each other when they meet.
struct Hello {
    int rank;
    int device;
    char host[64];
};

struct Comm {
    std::string name;
    int rank = 0, size = 1;
    /// Sockets to the others; -1 to itself.
    std::vector<int> peers;
    std::atomic<int> state{InProgress};
    std::atomic<bool> aborted{false};
    std::string error;
    uint64_t splits = 0;
    std::mutex waiting;
    std::condition_variable changed;

    ~Comm() {
        for (int socket : peers)
            if (socket >= 0) close(socket);
    }

    void fail(Result result, const std::string &why) {
        std::lock_guard<std::mutex> lock(waiting);
        if (state != Success && state != InProgress) return;
        error = why;
        state = result;
    }

    /// As a kernel that waits for a rank that is gone.
    void hang() {
        std::unique_lock<std::mutex> lock(waiting);
        changed.wait(lock, [this] { return aborted.load(); });
    }

    void abort() {
        {
            std::lock_guard<std::mutex> lock(waiting);
            aborted = true;
            changed.notify_all();
        }
        for (int socket : peers)
            if (socket >= 0) shutdown(socket, SHUT_RDWR);
    }
};

using SharedComm = std::shared_ptr<Comm>;

SharedComm &comm_of(void *handle) { return *static_cast<SharedComm *>(handle); }

bool write_all(int socket, const void *from, size_t bytes) {
    const char *at = static_cast<const char *>(from);
    while (bytes) {
        const ssize_t n = send(socket, at, bytes, MSG_NOSIGNAL);
        if (n <= 0) return false;
        at += n, bytes -= static_cast<size_t>(n);
    }
    return true;
}

bool read_all(int socket, void *to, size_t bytes) {
    char *at = static_cast<char *>(to);
    while (bytes) {
        const ssize_t n = recv(socket, at, bytes, 0);
        if (n <= 0) return false;
        at += n, bytes -= static_cast<size_t>(n);
    }
    return true;
}

sockaddr_un address(const std::string &name, int rank, socklen_t &length) {
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    const std::string path = name + "." + std::to_string(rank);
    // An abstract name: it begins with a zero and is not in the file system.
    std::memcpy(at.sun_path + 1, path.data(), std::min(path.size(), sizeof at.sun_path - 1));
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return at;
}

/// Connects a communicator's ranks: each listens for the higher ones and calls the lower ones.
void connect(const SharedComm &comm, int device) {
    comm->peers.assign(static_cast<size_t>(comm->size), -1);
    Hello mine{comm->rank, device, ""};
    const char *host = std::getenv("NCCL_HOSTID");
    std::snprintf(mine.host, sizeof mine.host, "%s", host ? host : "this machine");
    socklen_t length;
    sockaddr_un own = address(comm->name, comm->rank, length);
    const int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listening, reinterpret_cast<sockaddr *>(&own), length) || listen(listening, comm->size)) return comm->fail(SystemError, "cannot listen");
    std::vector<Hello> hellos(static_cast<size_t>(comm->size), mine);
    const auto meet = [&](int socket) {
        Hello theirs;
        if (!write_all(socket, &mine, sizeof mine) || !read_all(socket, &theirs, sizeof theirs)) return false;
        comm->peers[static_cast<size_t>(theirs.rank)] = socket;
        hellos[static_cast<size_t>(theirs.rank)] = theirs;
        return true;
    };
    for (int peer = 0; peer < comm->rank; peer++) {
        sockaddr_un theirs = address(comm->name, peer, length);
        const int calling = socket(AF_UNIX, SOCK_STREAM, 0);
        while (::connect(calling, reinterpret_cast<sockaddr *>(&theirs), length)) {
            if (comm->aborted) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (!meet(calling)) return comm->fail(RemoteError, "a peer went away while ranks met");
    }
    for (int missing = comm->size - 1 - comm->rank; missing > 0;) {
        pollfd waiting{listening, POLLIN, 0};
        if (poll(&waiting, 1, 10) <= 0) {
            if (comm->aborted) return;
            continue;
        }
        if (!meet(accept(listening, nullptr, nullptr))) return comm->fail(RemoteError, "a peer went away while ranks met");
        missing--;
    }
    close(listening);
    for (int a = 0; a < comm->size; a++)
        for (int b = 0; b < a; b++) {
            const Hello &one = hellos[static_cast<size_t>(a)], &other = hellos[static_cast<size_t>(b)];
            if (one.device == other.device && std::strcmp(one.host, other.host) == 0)
                return comm->fail(InvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " + std::to_string(b));
        }
    comm->state = Success;
}

enum class Kind { AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, Send, Recv };

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

float half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                            : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

uint16_t half_bits(float x) {
    const _Float16 narrow = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
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
void reduce_narrow(char *into, const char *with, size_t count, int op, bool is_half) {
    for (size_t i = 0; i < count; i++) {
        uint16_t a, b;
        std::memcpy(&a, into + 2 * i, 2);
        std::memcpy(&b, with + 2 * i, 2);
        const auto wide = [&](uint16_t bits) {
            if (is_half) return half_value(bits);
            const uint32_t word = static_cast<uint32_t>(bits) << 16;
            float x;
            std::memcpy(&x, &word, 4);
            return x;
        };
        const float sum = reduced(wide(a), wide(b), op);
        if (is_half) {
            a = half_bits(sum);
        } else {
            uint32_t word;
            std::memcpy(&word, &sum, 4);
            a = std::isnan(sum) ? 0x7fff : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
        }
        std::memcpy(into + 2 * i, &a, 2);
    }
}

void reduce_into(char *into, const char *with, size_t count, int type, int op) {
    switch (type) {
        case 1: return reduce_as<uint8_t>(into, with, count, op);
        case 3: return reduce_as<uint32_t>(into, with, count, op);
        case 4: return reduce_as<int64_t>(into, with, count, op);
        case 7: return reduce_as<float>(into, with, count, op);
        case 8: return reduce_as<double>(into, with, count, op);
        case 6: return reduce_narrow(into, with, count, op, true);
        case 9: return reduce_narrow(into, with, count, op, false);
        default: fault("NCCL: a type that is not summed here");
    }
}

/// What an operation begins with on the wire, so that one that meets another is noticed.
struct Header {
    int kind;
    size_t bytes;
};

bool send_message(int socket, Kind kind, const char *from, size_t bytes) {
    const Header header{static_cast<int>(kind), bytes};
    return write_all(socket, &header, sizeof header) && write_all(socket, from, bytes);
}

bool receive_message(int socket, Kind kind, char *to, size_t bytes) {
    Header header;
    if (!read_all(socket, &header, sizeof header)) return false;
    if (header.kind != static_cast<int>(kind) || header.bytes != bytes) {
        fault("NCCL: an operation of one rank meets another one of its peer");
        return false;
    }
    return read_all(socket, to, bytes);
}

/// Sends to every rank what `piece` says and returns what came from each, its own included; empty if a peer is gone.
template <class F>
std::vector<std::vector<char>> exchange(Comm &comm, Kind kind, size_t bytes, F piece) {
    std::vector<std::vector<char>> all(static_cast<size_t>(comm.size), std::vector<char>(bytes));
    std::memcpy(all[static_cast<size_t>(comm.rank)].data(), piece(comm.rank), bytes);
    bool sent = true, received = true;
    std::thread sender([&] {
        for (int i = 1; i < comm.size; i++) {
            const int peer = (comm.rank + i) % comm.size;
            sent = sent && send_message(comm.peers[static_cast<size_t>(peer)], kind, piece(peer), bytes);
        }
    });
    for (int i = 1; i < comm.size && received; i++) {
        const auto peer = static_cast<size_t>((comm.rank + comm.size - i) % comm.size);
        received = receive_message(comm.peers[peer], kind, all[peer].data(), bytes);
    }
    if (!received) comm.fail(RemoteError, "a peer closed its connection");
    sender.join();
    if (sent && received) return all;
    comm.fail(RemoteError, "a peer closed its connection");
    return {};
}

bool collective(const Operation &o) {
    Comm &comm = *o.comm;
    const size_t bytes = o.count * size_of(o.type);
    const bool is_root = comm.rank == o.peer;
    const size_t apart = o.kind == Kind::ReduceScatter ? bytes : 0;
    // As simple as can be: everybody gets everything.
    auto all = exchange(comm, o.kind, bytes, [&](int peer) { return o.from + apart * static_cast<size_t>(peer); });
    if (all.empty()) return false;
    switch (o.kind) {
        case Kind::AllGather:
            for (size_t peer = 0; peer < all.size(); peer++) std::memcpy(o.to + peer * bytes, all[peer].data(), bytes);
            return true;
        case Kind::Broadcast: std::memcpy(o.to, all[static_cast<size_t>(o.peer)].data(), bytes); return true;
        default: break;
    }
    for (size_t peer = 1; peer < all.size(); peer++) reduce_into(all[0].data(), all[peer].data(), o.count, o.type, o.op);
    if (o.kind != Kind::Reduce || is_root) std::memcpy(o.to, all[0].data(), bytes);
    return true;
}

/// Sends and receives of one group, none of which waits for another.
bool messages(const std::vector<Operation> &group) {
    std::atomic<bool> well{true};
    std::map<std::pair<int, Kind>, std::vector<const Operation *>> lines;
    for (const Operation &o : group) lines[{o.peer, o.kind}].push_back(&o);
    std::vector<std::thread> threads;
    for (auto &line : lines) {
        const int peer = line.first.first;
        Comm &comm = *group[0].comm;
        if (peer == comm.rank) {
            // To itself: what is sent first is received first.
            if (line.first.second == Kind::Recv) continue;
            auto &receives = lines[{peer, Kind::Recv}];
            for (size_t i = 0; i < line.second.size() && i < receives.size(); i++)
                std::memmove(receives[i]->to, line.second[i]->from, line.second[i]->count * size_of(line.second[i]->type));
            continue;
        }
        threads.emplace_back([&comm, &line, &well, peer] {
            const int socket = comm.peers[static_cast<size_t>(peer)];
            for (const Operation *o : line.second) {
                const size_t bytes = o->count * size_of(o->type);
                const bool done = o->kind == Kind::Send ? send_message(socket, Kind::Send, o->from, bytes) : receive_message(socket, Kind::Send, o->to, bytes);
                if (done) continue;
                comm.fail(RemoteError, "a peer closed its connection");
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

/// Queues what a group gathered: one operation of its stream for each communicator.
void flush() {
    std::vector<Operation> all = std::move(grouped);
    grouped.clear();
    while (!all.empty()) {
        std::vector<Operation> mine, others;
        for (Operation &o : all) (o.comm == all[0].comm ? mine : others).push_back(o);
        const CUstream stream = mine[0].stream;
        stream_of(stream).queue([mine] {
            const SharedComm comm = mine[0].comm;
            std::vector<Operation> between;
            bool well = true;
            for (const Operation &o : mine) {
                if (o.kind == Kind::Send || o.kind == Kind::Recv)
                    between.push_back(o);
                else
                    well = well && collective(o);
            }
            if (well && !between.empty()) well = messages(between);
            if (!well) comm->hang();
        });
        all = std::move(others);
    }
}

int add(Operation operation) {
    if (operation.comm->state == InProgress) return InvalidUsage;
    grouped.push_back(std::move(operation));
    if (depth == 0) flush();
    return Success;
}

void start(const SharedComm &comm) {
    CUdevice device = 0;
    cuCtxGetDevice(&device);
    std::thread([comm, device] { connect(comm, device); }).detach();
}

}  // namespace

}  // namespace standin

using namespace standin;

extern "C" {

int ncclGetVersion(int *version) {
    *version = 22900;
    return Success;
}

const char *ncclGetErrorString(int result) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
                                        "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(void *comm) { return comm ? comm_of(comm)->error.c_str() : ""; }

int ncclGetUniqueId(Id *id) {
    static std::atomic<uint64_t> made{0};
    std::memset(id, 0, sizeof *id);
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    std::snprintf(id->internal, sizeof id->internal, "standin-%d-%lld-%llu", getpid(), static_cast<long long>(now), static_cast<unsigned long long>(made++));
    return Success;
}

int ncclCommInitRankConfig(void **handle, int size, Id id, int rank, void *) {
    auto comm = std::make_shared<Comm>();
    comm->name = id.internal;
    comm->rank = rank;
    comm->size = size;
    *handle = new SharedComm(comm);
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
        auto all = exchange(*parent, Kind::AllGather, sizeof mine, [&](int) { return reinterpret_cast<const char *>(mine); });
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
        *handle = color < 0 ? nullptr : new SharedComm(comm);
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
    comm_of(handle)->abort();
    delete &comm_of(handle);
    return Success;
}

int ncclCommDestroy(void *handle) {
    delete &comm_of(handle);
    return Success;
}

int ncclGroupStart() {
    depth++;
    return Success;
}

int ncclGroupEnd() {
    if (--depth == 0) flush();
    return Success;
}

int ncclAllReduce(const char *from, char *to, size_t count, int type, int op, void *comm, CUstream stream) {
    return add({Kind::AllReduce, comm_of(comm), stream, from, to, count, type, op, 0});
}

int ncclAllGather(const char *from, char *to, size_t count, int type, void *comm, CUstream stream) {
    return add({Kind::AllGather, comm_of(comm), stream, from, to, count, type, 0, 0});
}

int ncclReduceScatter(const char *from, char *to, size_t count, int type, int op, void *comm, CUstream stream) {
    return add({Kind::ReduceScatter, comm_of(comm), stream, from, to, count, type, op, 0});
}

int ncclBroadcast(const char *from, char *to, size_t count, int type, int root, void *comm, CUstream stream) {
    return add({Kind::Broadcast, comm_of(comm), stream, from, to, count, type, 0, root});
}

int ncclReduce(const char *from, char *to, size_t count, int type, int op, int root, void *comm, CUstream stream) {
    return add({Kind::Reduce, comm_of(comm), stream, from, to, count, type, op, root});
}

int ncclSend(const char *from, size_t count, int type, int peer, void *comm, CUstream stream) {
    return add({Kind::Send, comm_of(comm), stream, from, nullptr, count, type, 0, peer});
}

int ncclRecv(char *to, size_t count, int type, int peer, void *comm, CUstream stream) {
    return add({Kind::Recv, comm_of(comm), stream, nullptr, to, count, type, 0, peer});
}

}  // extern "C"
