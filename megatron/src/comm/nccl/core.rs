//! NCCL's part of a group: a communicator, a stream, the operations in flight on it, and the
//! conversion of its failures to failures of the run.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DriverError};
use kernels::tensor::gpu::DevicePointer;
use kernels::tensor::trace::{Kind, Part, timed};

use super::library::{Comm, Failed, Operation};
use super::watchdog::{ASK, VERDICT, Watchdog};
use crate::comm::communicator::{Group, Pending, Work};
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// The data of NCCL's part of a group while operations are in flight.
pub struct Core {
    /// The group of the same ranks on the CPU.
    pub host: Group,
    pub comm: Comm,
    /// The stream on which operations run one after the other.
    pub stream: Arc<CudaStream>,
    pub in_flight: Mutex<Vec<InFlight>>,
    pub watchdog: Arc<Watchdog>,
}

/// An operation whose event the device has not reached.
pub struct InFlight {
    pub what: &'static str,
    pub since: Instant,
    pub done: Arc<CudaEvent>,
    /// Kept alive, because freeing them would reuse their memory in the order of another stream.
    _tensors: Vec<Tensor>,
}

pub fn driver(e: DriverError) -> Error {
    Error::comm(format!("CUDA: {e}"))
}

impl Core {
    fn new(
        host: Group,
        comm: Comm,
        context: &Arc<CudaContext>,
        watchdog: &Arc<Watchdog>,
    ) -> Result<Arc<Self>> {
        let core = Arc::new(Self {
            host,
            comm,
            stream: context.new_stream().map_err(driver)?,
            in_flight: Mutex::default(),
            watchdog: watchdog.clone(),
        });
        watchdog.watch(&core);
        Ok(core)
    }

    /// Creates a group and connects its ranks. All ranks run a first operation on an f32 here, so
    /// that no later operation must wait for connections while its peers are in an operation of
    /// another group.
    pub fn connected(
        host: Group,
        comm: Comm,
        context: &Arc<CudaContext>,
        watchdog: &Arc<Watchdog>,
        first: impl FnOnce(DevicePointer) -> Operation,
    ) -> Result<Arc<Self>> {
        let core = Self::new(host, comm, context, watchdog)?;
        let zero = core.stream.alloc_zeros::<f32>(1).map_err(driver)?;
        let at = DevicePointer::new(zero.device_ptr(&core.stream).0);
        core.comm
            .queue(&core.stream, &[first(at)])
            .map_err(|failed| core.cause("the first operation", failed))?;
        core.settle("the first operation")?;
        let done =
            core.stream.record_event(None).map_err(|e| core.driver("the first operation", e))?;
        core.wait_until("the first operation", || match done.try_is_complete() {
            Ok(ended) => Ok(ended),
            Err(e) => Err(core.driver("the first operation", e)),
        })?;
        Ok(core)
    }

    pub fn label(&self) -> String {
        let ranks: Vec<String> = self.host.ranks().iter().map(usize::to_string).collect();
        format!("group {} (ranks {})", self.host.name(), ranks.join(","))
    }

    /// Fails if the run is over.
    ///
    /// # Errors
    /// The first cause, whatever failed because of it later. `what` is the operation that cannot
    /// run now.
    pub fn check(&self, what: &str) -> Result<()> {
        if let Some(found) = self.watchdog.found() {
            return Err(Error::comm(found));
        }
        let needed = |error| match error {
            Error::PeerLost { rank, how, .. } => {
                Error::PeerLost { rank, how, operation: format!("{what} on {}", self.label()) }
            }
            other => other,
        };
        self.host.health().map_err(needed)?;
        if self.watchdog.is_over() {
            return Err(Error::comm(format!("{what} on {}: the run is over", self.label())));
        }
        Ok(())
    }

    /// The error to report when NCCL refuses `what`: the first cause, if it is known or found at
    /// once. NCCL itself reports neither why a communicator was aborted nor which peer is missing.
    pub fn cause(&self, what: &str, failed: Failed) -> Error {
        let start = Instant::now();
        // Longer than the watchdog waits, so that both report the same if they meet the same
        // failure.
        let patience = if matches!(failed, Failed::Remote(_)) {
            VERDICT + VERDICT / 4
        } else {
            Duration::ZERO
        };
        loop {
            if let Err(cause) = self.check(what) {
                return cause;
            }
            if start.elapsed() >= patience {
                return Error::comm(format!("{what} on {}: {failed}", self.label()));
            }
            std::thread::sleep(ASK);
        }
    }

    /// As [`Core::cause`], for an error of the driver.
    pub fn driver(&self, what: &str, e: DriverError) -> Error {
        self.cause(what, Failed::Here(format!("CUDA: {e}")))
    }

    /// Queues `operations`, which use `tensors`, after the work queued on `compute`.
    pub fn queue(
        self: &Arc<Self>,
        what: &'static str,
        compute: &Arc<CudaStream>,
        tensors: Vec<Tensor>,
        operations: &[Operation],
    ) -> Result<Work> {
        self.check(what)?;
        let before = compute.record_event(None).map_err(|e| self.driver(what, e))?;
        let done = self.queue_behind(what, &before, tensors, operations)?;
        Ok(Work::pending(Queued { core: self.clone(), compute: compute.clone(), done, what }))
    }

    /// As [`Core::queue`], but after an event.
    pub fn queue_behind(
        &self,
        what: &'static str,
        before: &CudaEvent,
        tensors: Vec<Tensor>,
        operations: &[Operation],
    ) -> Result<Arc<CudaEvent>> {
        self.stream.wait(before).map_err(|e| self.driver(what, e))?;
        self.comm.queue(&self.stream, operations).map_err(|failed| self.cause(what, failed))?;
        self.settle(what)?;
        let done = Arc::new(self.stream.record_event(None).map_err(|e| self.driver(what, e))?);
        let mut in_flight = lock(&self.in_flight);
        let ended: Vec<_> =
            in_flight.extract_if(.., |earlier| earlier.done.is_complete()).collect();
        in_flight.push(InFlight {
            what,
            since: Instant::now(),
            done: done.clone(),
            _tensors: tensors,
        });
        // Freeing memory waits while the GPU's queue is full. The lock is released first, so that
        // the watchdog, which may have to empty the queue, does not wait, too.
        drop(in_flight);
        drop(ended);
        Ok(done)
    }

    /// Waits until NCCL has queued the operations it accepted. The first operations of a group
    /// connect its ranks.
    pub fn settle(&self, what: &str) -> Result<()> {
        self.wait_until(what, || self.comm.is_ready().map_err(|failed| self.cause(what, failed)))
    }

    /// Waits for `is_done`, but only while the run continues, and at most the time limit of an
    /// operation, because a hanging peer may not be missed by any other rank.
    fn wait_until(&self, what: &str, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while !is_done()? {
            if start.elapsed() < Duration::from_millis(1) {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(Duration::from_micros(200));
            self.check(what)?;
            let timeout = self.watchdog.timeout();
            if start.elapsed() > timeout {
                let label = self.label();
                return Err(Error::comm(format!(
                    "{what} on {label}: a peer did not arrive within {timeout:?}; it hangs or runs a different operation"
                )));
            }
        }
        Ok(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // No thread waits any more for the operations of a thread that panicked. Other ranks are
        // told at once, not after the wait below.
        if std::thread::panicking() {
            self.host.abort("its thread panicked");
            self.watchdog.end();
        }
        // Otherwise only aborted operations may still be queued. NCCL uses their stream and tensors
        // until the abort is complete.
        if self.watchdog.is_over() {
            return self.watchdog.wait_for_end();
        }
        // The watchdog no longer watches this group. A failed device has nothing to wait for.
        let (start, done) = (Instant::now(), self.stream.record_event(None));
        while done.as_ref().is_ok_and(|done| done.try_is_complete() == Ok(false)) {
            if start.elapsed() > self.watchdog.timeout() || self.host.health().is_err() {
                return self.comm.abort();
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// A queued operation.
struct Queued {
    core: Arc<Core>,
    compute: Arc<CudaStream>,
    done: Arc<CudaEvent>,
    what: &'static str,
}

impl Pending for Queued {
    fn wait(self: Box<Self>) -> Result<()> {
        let _span = timed(self.what, Kind::Communication, Part::Wait);
        self.core.check(self.what)?;
        self.compute.wait(&self.done).map_err(|e| self.core.driver(self.what, e))
    }

    fn detach(self: Box<Self>) {
        // The tensors may be reused without a wait by the caller.
        let _ = self.compute.wait(&self.done);
    }
}
