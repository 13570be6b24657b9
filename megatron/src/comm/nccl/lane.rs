//! Messages between two ranks: one lane for each direction and tag, with its own communicator and
//! stream.
//!
//! NCCL matches the messages of a communicator by their order alone, and a send occupies its stream
//! until the peer receives. On a common stream, two stages that both send an activation would wait
//! for each other's gradient. Lanes are independent, like the messages of CPU transports: a sent
//! message waits only for its receiver.
//!
//! The two ranks of a lane connect when it starts, on the lane's own thread, so that no other work
//! waits for it. Pipelines start their lanes before the first step ([`Lane::connected`]):
//! connecting takes memory and may wait for the device, which must not happen between messages that
//! wait for each other.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use kernels::tensor::gpu::DevicePointer;

use super::core::{Core, driver};
use super::library::{Comm, ID_BYTES, Operation};
use super::{Used, joined, library};
use crate::comm::communicator::{Group, Pending, Work};
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// Interval at which a thread that waits for a lane's thread checks whether the run continues.
const PATIENCE: Duration = Duration::from_millis(100);

/// Tags of the CPU messages that carry a lane's identity.
const IDENTITIES: u32 = 1 << 30;

/// Direction of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    To,
    From,
}

impl Direction {
    /// Name of this rank's operation.
    fn what(self) -> &'static str {
        match self {
            Self::To => "send",
            Self::From => "recv",
        }
    }
}

/// One message to queue.
struct Message {
    t: Tensor,
    used: Used,
    /// Event on the stream that computes the tensor, at the time of issue.
    before: CudaEvent,
    queued: Arc<Queued>,
}

/// The state of a message.
#[derive(Default)]
struct Queued {
    /// The event of the message's completion, once it is queued.
    done: Mutex<Option<Result<Arc<CudaEvent>>>>,
    changed: Condvar,
}

/// Whether the ranks of a lane have connected, or the reason why not.
#[derive(Default)]
struct Meeting {
    outcome: Mutex<Option<std::result::Result<(), String>>>,
    changed: Condvar,
}

/// Messages to, or from, one rank with one tag.
pub struct Lane {
    /// `None` while the lane is being dropped.
    messages: Mutex<Option<Sender<Message>>>,
    core: Arc<Core>,
    direction: Direction,
    meeting: Arc<Meeting>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Sent messages are delivered unless the run failed; then the watchdog aborts them.
        *lock(&self.messages) = None;
        if let Some(thread) = self.thread.take().filter(|_| !std::thread::panicking()) {
            let _ = thread.join();
        }
    }
}

/// The data of the lane's thread.
struct Worker {
    host: Group,
    parent: Arc<Core>,
    context: Arc<CudaContext>,
    direction: Direction,
    peer: usize,
    tag: u32,
}

impl Lane {
    /// Starts the lane's thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        core: &Arc<Core>,
        context: &Arc<CudaContext>,
        direction: Direction,
        peer: usize,
        tag: u32,
    ) -> Result<Self> {
        let (sender, receiver) = channel();
        let (host, parent, context) = (core.host.clone(), core.clone(), context.clone());
        let worker = Worker { host, parent, context, direction, peer, tag };
        let meeting = Arc::new(Meeting::default());
        let met = meeting.clone();
        let builder = std::thread::Builder::new().name(format!("nccl-lane-{peer}-{tag}"));
        let thread = builder
            .spawn(move || worker.work(&receiver, &met))
            .map_err(|e| Error::comm(format!("cannot start a thread for messages: {e}")))?;
        Ok(Self {
            messages: Mutex::new(Some(sender)),
            core: core.clone(),
            direction,
            meeting,
            thread: Some(thread),
        })
    }

    /// Waits until the lane's ranks have connected.
    ///
    /// # Errors
    /// If they cannot connect, or the run is over.
    pub fn connected(&self) -> Result<()> {
        let mut outcome = lock(&self.meeting.outcome);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone().map_err(Error::comm);
            }
            self.core.check(self.direction.what())?;
            outcome = self
                .meeting
                .changed
                .wait_timeout(outcome, PATIENCE)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Queues a message; never waits for the peer.
    ///
    /// # Errors
    /// If the run is over.
    pub fn queue(&self, t: &Tensor, used: Used) -> Result<Work> {
        self.core.check(self.direction.what())?;
        let compute = used.compute.clone();
        let before = compute.record_event(None).map_err(driver)?;
        let queued = Arc::new(Queued::default());
        let message = Message { t: t.clone(), used, before, queued: queued.clone() };
        let sent =
            lock(&self.messages).as_ref().is_some_and(|messages| messages.send(message).is_ok());
        if !sent {
            return Err(Error::comm("the thread of these messages has ended"));
        }
        if self.direction == Direction::To {
            // A sender need not wait: the lane keeps the tensor until it is sent.
            return Ok(Work::done());
        }
        Ok(Work::pending(Receive { queued, compute, core: self.core.clone() }))
    }
}

impl Worker {
    fn work(self, messages: &Receiver<Message>, meeting: &Meeting) {
        let own = self.connect().map_err(|error| error.to_string());
        if let Err(why) = &own {
            self.host.abort(why);
        }
        *lock(&meeting.outcome) = Some(own.as_ref().map(|_| ()).map_err(String::clone));
        meeting.changed.notify_all();
        while let Ok(message) = messages.recv() {
            let result =
                own.as_ref().map_err(Error::comm).and_then(|own| self.queue(own, &message));
            if let Err(error) = &result {
                // A sender does not wait for its message, so the failure is reported here.
                self.host.abort(&error.to_string());
            }
            *lock(&message.queued.done) = Some(result);
            message.queued.changed.notify_all();
        }
    }

    /// A message of `count` elements at `at`. The sender is rank 0 of the lane's communicator.
    fn operation(&self, at: DevicePointer, count: usize, dtype: DType) -> Operation {
        match self.direction {
            Direction::To => Operation::Send { from: at, count, dtype, peer: 1 },
            Direction::From => Operation::Recv { to: at, count, dtype, peer: 0 },
        }
    }

    fn queue(&self, own: &Core, message: &Message) -> Result<Arc<CudaEvent>> {
        let operation = self.operation(message.used.at, message.t.elem_count(), message.t.dtype());
        own.queue_behind(
            self.direction.what(),
            &message.before,
            vec![message.t.clone()],
            &[operation],
        )
    }

    /// Connects to the peer. The sender is rank 0 of the lane's communicator and creates its
    /// identity.
    fn connect(&self) -> Result<Arc<Core>> {
        let timeout = self.parent.watchdog.timeout();
        let tag = IDENTITIES | self.tag;
        let (rank, id) = match self.direction {
            Direction::To => {
                let id = library::unique_id()?;
                let message = Tensor::from_vec(id.to_vec(), ID_BYTES, &Device::Cpu)?;
                self.host.send(&message, self.peer, tag)?.wait()?;
                (0, id)
            }
            Direction::From => {
                let message = Tensor::zeros(ID_BYTES, DType::U8, &Device::Cpu)?;
                self.host.recv(&message, self.peer, tag)?.wait()?;
                let id = message.to_vec1::<u8>()?;
                (1, id.try_into().map_err(|_| Error::comm("a lane's id has the wrong length"))?)
            }
        };
        let comm = Comm::join(&self.context, &id, 2, rank)?;
        joined(&comm, &self.host, timeout)?;
        let first = |at| self.operation(at, 1, DType::F32);
        Core::connected(self.host.clone(), comm, &self.context, &self.parent.watchdog, first)
    }
}

/// A receive. The tensor's stream waits for it, once the lane has queued it.
struct Receive {
    queued: Arc<Queued>,
    compute: Arc<CudaStream>,
    core: Arc<Core>,
}

impl Receive {
    fn complete(&self) -> Result<()> {
        let mut done = lock(&self.queued.done);
        loop {
            if let Some(result) = done.take() {
                let event = result?;
                self.compute.wait(&event).map_err(driver)?;
                *done = Some(Ok(event));
                return self.core.check("recv");
            }
            self.core.check("recv")?;
            done = self
                .queued
                .changed
                .wait_timeout(done, PATIENCE)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Pending for Receive {
    fn wait(self: Box<Self>) -> Result<()> {
        self.complete()
    }

    fn detach(self: Box<Self>) {
        let _ = self.complete();
    }
}
