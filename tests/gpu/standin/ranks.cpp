#include "ranks.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "device.hpp"

namespace standin {

namespace {

/// The messages of ranks when they connect.
struct Hello {
    int rank;
    int device;
    char host[64];
};

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
    // An abstract name: it begins with a zero byte and is not in the file system.
    std::memcpy(at.sun_path + 1, path.data(), std::min(path.size(), sizeof at.sun_path - 1));
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return at;
}

/// The header of an operation on the wire, to detect that different operations meet.
struct Header {
    int kind;
    size_t bytes;
};

} // namespace

Comm::~Comm() {
    for (int socket : peers)
        if (socket >= 0) close(socket);
}

void Comm::fail(Result result, const std::string &why) {
    std::lock_guard<std::mutex> lock(waiting);
    if (state != Success && state != InProgress) return;
    error = why;
    state = result;
}

void Comm::change(Result from, Result to) {
    int expected = from;
    state.compare_exchange_strong(expected, to);
}

void Comm::lose_peer() {
    if (tells_of_peers() && !aborted) fail(RemoteError, "a peer closed its connection");
}

void Comm::hang() {
    std::unique_lock<std::mutex> lock(waiting);
    changed.wait(lock, [this] { return aborted.load(); });
}

void Comm::abort() {
    {
        std::lock_guard<std::mutex> lock(waiting);
        aborted = true;
        changed.notify_all();
    }
    for (int socket : peers)
        if (socket >= 0) shutdown(socket, SHUT_RDWR);
}

bool tells_of_peers() {
    static const bool told = [] {
        const char *text = std::getenv("STANDIN_NCCL_REMOTE_ERROR");
        return text && std::atoi(text) != 0;
    }();
    return told;
}

namespace {

/// Watches for peers that close their connection, as NCCL's proxy thread does, until no peer is
/// left to watch.
void watch(const std::weak_ptr<Comm> &watched) {
    for (;;) {
        const SharedComm comm = watched.lock();
        if (!comm || comm->aborted) return;
        std::vector<pollfd> sockets;
        for (int socket : comm->peers)
            if (socket >= 0) sockets.push_back({socket, POLLRDHUP, 0});
        if (poll(sockets.data(), sockets.size(), 10) > 0) return comm->lose_peer();
    }
}

} // namespace

void connect(const SharedComm &comm, int device) {
    comm->peers.assign(static_cast<size_t>(comm->size), -1);
    Hello mine{comm->rank, device, ""};
    const char *host = std::getenv("NCCL_HOSTID");
    std::snprintf(mine.host, sizeof mine.host, "%s", host ? host : "this machine");
    socklen_t length;
    sockaddr_un own = address(comm->name, comm->rank, length);
    const int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listening, reinterpret_cast<sockaddr *>(&own), length) ||
        listen(listening, comm->size))
        return comm->fail(SystemError, "cannot listen");
    std::vector<Hello> hellos(static_cast<size_t>(comm->size), mine);
    const auto meet = [&](int socket) {
        Hello theirs;
        if (!write_all(socket, &mine, sizeof mine) || !read_all(socket, &theirs, sizeof theirs))
            return false;
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
        if (!meet(accept(listening, nullptr, nullptr)))
            return comm->fail(RemoteError, "a peer went away while ranks met");
        missing--;
    }
    close(listening);
    for (int a = 0; a < comm->size; a++)
        for (int b = 0; b < a; b++) {
            const Hello &one = hellos[static_cast<size_t>(a)],
                        &other = hellos[static_cast<size_t>(b)];
            if (one.device == other.device && std::strcmp(one.host, other.host) == 0)
                return comm->fail(InvalidUsage, "Duplicate GPU detected : rank " +
                                                    std::to_string(a) + " and rank " +
                                                    std::to_string(b));
        }
    comm->state = Success;
    if (tells_of_peers()) std::thread(watch, std::weak_ptr<Comm>(comm)).detach();
}

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

std::vector<std::vector<char>> exchange(
    Comm &comm, Kind kind, size_t bytes, const char *parts, size_t apart) {
    const auto piece = [&](int peer) { return parts + apart * static_cast<size_t>(peer); };
    std::vector<std::vector<char>> all(static_cast<size_t>(comm.size), std::vector<char>(bytes));
    std::memcpy(all[static_cast<size_t>(comm.rank)].data(), piece(comm.rank), bytes);
    bool sent = true, received = true;
    std::thread sender([&] {
        for (int i = 1; i < comm.size; i++) {
            const int peer = (comm.rank + i) % comm.size;
            sent = sent &&
                   send_message(comm.peers[static_cast<size_t>(peer)], kind, piece(peer), bytes);
        }
    });
    for (int i = 1; i < comm.size && received; i++) {
        const auto peer = static_cast<size_t>((comm.rank + comm.size - i) % comm.size);
        received = receive_message(comm.peers[peer], kind, all[peer].data(), bytes);
    }
    if (!received) comm.lose_peer();
    sender.join();
    if (sent && received) return all;
    comm.lose_peer();
    return {};
}

} // namespace standin
