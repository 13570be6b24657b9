// NCCL's communicators between processes of one machine: how ranks connect, and their messages over
// sockets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace standin {

enum Result { Success = 0, UnhandledCudaError = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5, RemoteError = 6, InProgress = 7 };

struct Comm {
    std::string name;
    int rank = 0, size = 1;
    /// Sockets to the other ranks; -1 for the rank itself.
    std::vector<int> peers;
    std::atomic<int> state{InProgress};
    std::atomic<bool> aborted{false};
    /// Operations that wait for room in their stream's queue.
    std::atomic<int> launching{0};
    std::string error;
    uint64_t splits = 0;
    std::mutex waiting;
    std::condition_variable changed;

    ~Comm();

    void fail(Result result, const std::string &why);

    /// Sets the state to `to` if it is `from`.
    void change(Result from, Result to);

    /// A peer is gone. NCCL reports this or not (STANDIN_NCCL_REMOTE_ERROR).
    void lose_peer();

    /// Hangs, as a kernel does that waits for a lost rank.
    void hang();

    void abort();
};

using SharedComm = std::shared_ptr<Comm>;

/// Whether a lost peer is an asynchronous error at once. If not, operations that need it hang.
bool tells_of_peers();

/// Connects a communicator's ranks: each listens for higher ranks and calls lower ones.
void connect(const SharedComm &comm, int device);

enum class Kind { AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, Send, Recv };

/// Sends an operation's data, or receives the data of the same operation; false if the peer is
/// gone.
bool send_message(int socket, Kind kind, const char *from, size_t bytes);
bool receive_message(int socket, Kind kind, char *to, size_t bytes);

/// Sends every rank its part; parts are `apart` bytes apart. Returns the part from each rank,
/// including this one; empty if a peer is gone.
std::vector<std::vector<char>> exchange(Comm &comm, Kind kind, size_t bytes, const char *parts, size_t apart);

}  // namespace standin
