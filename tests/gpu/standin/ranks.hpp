// NCCL's communicators between processes of one machine: how ranks meet, and the messages they
// exchange over sockets.
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
    /// Sockets to the others; -1 to itself.
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

    /// Makes the state `to` if it is `from`.
    void change(Result from, Result to);

    /// A peer is gone, which NCCL tells or not (STANDIN_NCCL_REMOTE_ERROR).
    void lose_peer();

    /// As a kernel that waits for a rank that is gone.
    void hang();

    void abort();
};

using SharedComm = std::shared_ptr<Comm>;

/// Whether a peer that is gone is an asynchronous error at once. If not, what needs it hangs.
bool tells_of_peers();

/// Connects a communicator's ranks: each listens for the higher ones and calls the lower ones.
void connect(const SharedComm &comm, int device);

enum class Kind { AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, Send, Recv };

/// Sends an operation's data, or receives those of the same operation; false if the peer is gone.
bool send_message(int socket, Kind kind, const char *from, size_t bytes);
bool receive_message(int socket, Kind kind, char *to, size_t bytes);

/// Sends to every rank its part, `apart` bytes from that of the rank before it, and returns what
/// came from each, its own included; empty if a peer is gone.
std::vector<std::vector<char>> exchange(Comm &comm, Kind kind, size_t bytes, const char *parts, size_t apart);

}  // namespace standin
