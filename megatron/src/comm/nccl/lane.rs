//! Messages between two ranks: a lane for each direction and tag, with a communicator and a stream
//! of its own.
//!
//! NCCL matches messages of a communicator by their order alone, and a send occupies its stream
//! until the peer receives. On a common stream two stages that both have an activation under way
//! would wait for each other's gradient. Lanes are independent, as messages of the CPU's transports
//! are: what is sent waits for its receiver and for nothing else. The two ranks of a lane meet when
//! it starts, on the lane's thread, so that nobody else waits for it. Pipelines start theirs before
//! the first step ([`Lane::connected`]): connecting takes memory and may wait for the device, which
//! must not be amid messages that wait for each other.

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

/// How long somebody who waits for a lane's thread does so before looking whether the run goes on.
const PATIENCE: Duration = Duration::from_millis(100);

/// Tags of the CPU's messages that carry a lane's identity.
const IDENTITIES: u32 = 1 << 30;

/// Which way messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    To,
    From,
}

impl Direction {
    /// The operation of this rank.
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
    /// Of the stream that the tensor is computed on, when the message was issued.
    before: CudaEvent,
    queued: Arc<Queued>,
}

/// Where a message stands.
#[derive(Default)]
struct Queued {
    /// The event that ends it, once it is queued.
    done: Mutex<Option<Result<Arc<CudaEvent>>>>,
    changed: Condvar,
}

/// Whether the ranks of a lane have met; if not, why.
#[derive(Default)]
struct Meeting {
    outcome: Mutex<Option<std::result::Result<(), String>>>,
    changed: Condvar,
}

/// Messages to, or from, one rank under one tag.
pub struct Lane {
    /// None while the lane is dropped.
    messages: Mutex<Option<Sender<Message>>>,
    core: Arc<Core>,
    direction: Direction,
    meeting: Arc<Meeting>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // What was sent is sent, unless the run failed; then the watchdog lets go of it.
        *lock(&self.messages) = None;
        if let Some(thread) = self.thread.take().filter(|_| !std::thread::panicking()) {
            let _ = thread.join();
        }
    }
}

/// What the lane's thread works with.
struct Worker {
    host: Group,
    parent: Arc<Core>,
    context: Arc<CudaContext>,
    direction: Direction,
    peer: usize,
    tag: u32,
}

impl Lane {
    /// Starts its thread.
    ///
    /// # Errors
    /// If there can be no thread.
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

    /// Waits until its ranks have met.
    ///
    /// # Errors
    /// If they cannot, or the run is over.
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
            // Whoever sends may forget about it: the lane keeps the tensor until it is sent.
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
                // A sender does not wait for its message, so this is where a failure is told.
                self.host.abort(&error.to_string());
            }
            *lock(&message.queued.done) = Some(result);
            message.queued.changed.notify_all();
        }
    }

    /// A message of `count` elements at `at`: the sender is rank 0 of the lane's communicator.
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

    /// Meets the peer: the sender is rank 0 of the lane's communicator and makes its identity.
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

/// A message that is received: waited for by the tensor's stream, once the lane has queued it.
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
