//! Ensures that no rank hangs: polls NCCL's errors, the age of queued operations and the CPU
//! group's verdict, and aborts all communicators together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::core::{Core, InFlight};
use super::library;
use super::library::Failed;
use crate::comm::communicator::Group;
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// Interval between checks.
const TICK: Duration = Duration::from_millis(100);
/// Time for the CPU transport to find the lost rank after NCCL reports an error about a peer. The
/// transport can name the rank, and checks for dead processes every second.
pub const VERDICT: Duration = Duration::from_secs(2);
/// Interval at which the transport's verdict is polled.
pub const ASK: Duration = Duration::from_millis(20);
/// Time limit, counted from the start of the aborts, for a caller that waits to free what the
/// communicators use.
const ENDED_WITHIN: Duration = Duration::from_secs(3);

/// One per rank. Its thread ends when it is dropped.
pub struct Watchdog {
    world: Group,
    timeout: Duration,
    cores: Mutex<Vec<Weak<Core>>>,
    /// The failure that this rank found itself and that caused the aborts. If other ranks reported
    /// that the run is over, the CPU transport knows the reason.
    found: OnceLock<String>,
    /// Whether communicators are aborted or about to be.
    over: AtomicBool,
    end: Mutex<End>,
    ended: Condvar,
}

/// Progress of the aborts.
#[derive(Default)]
struct End {
    began: Option<Instant>,
    done: bool,
}

impl Watchdog {
    /// Starts the watchdog's thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(world: Group, timeout: Duration) -> Result<Arc<Self>> {
        let watchdog = Arc::new(Self {
            world,
            timeout,
            cores: Mutex::default(),
            found: OnceLock::new(),
            over: AtomicBool::new(false),
            end: Mutex::default(),
            ended: Condvar::new(),
        });
        let watched = Arc::downgrade(&watchdog);
        let thread = move || {
            while let Some(watchdog) = watched.upgrade() {
                watchdog.look();
                drop(watchdog);
                std::thread::sleep(TICK);
            }
        };
        let builder = std::thread::Builder::new().name("nccl-watchdog".to_string());
        builder
            .spawn(thread)
            .map_err(|e| Error::comm(format!("cannot start NCCL's watchdog: {e}")))?;
        Ok(watchdog)
    }

    /// Time limit for an operation after it is queued.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Watches a group as long as it lives.
    pub fn watch(&self, core: &Arc<Core>) {
        let mut cores = lock(&self.cores);
        cores.retain(|core| core.strong_count() > 0);
        cores.push(Arc::downgrade(core));
        drop(cores);
        // A group created during the aborts is not among the aborted ones.
        if self.is_over() {
            core.comm.abort();
        }
    }

    /// Whether communicators are aborted or about to be.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// The failure that this rank found, if it ended the run.
    pub fn found(&self) -> Option<&str> {
        self.found.get().map(String::as_str)
    }

    /// Waits until the communicators are aborted, if an abort has begun: what they use must not be
    /// freed before. Gives up on an abort that hangs.
    pub fn wait_for_end(&self) {
        let mut end = lock(&self.end);
        while let (Some(began), false) = (end.began, end.done) {
            let left = ENDED_WITHIN.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            end = self.ended.wait_timeout(end, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn groups(&self) -> Vec<Arc<Core>> {
        lock(&self.cores).iter().filter_map(Weak::upgrade).collect()
    }

    fn look(self: &Arc<Self>) {
        if self.is_over() {
            return;
        }
        if self.world.health().is_err() {
            // The CPU transport already tells all ranks.
            return self.end();
        }
        for core in self.groups() {
            if let Some(why) = self.trouble_of(&core) {
                self.found.get_or_init(|| why.clone());
                self.world.abort(&why);
                return self.end();
            }
            if self.is_over() {
                return;
            }
        }
    }

    /// The failure of a group, unless the CPU transport has a verdict on it. With a verdict, this
    /// function aborts the communicators.
    fn trouble_of(self: &Arc<Self>, core: &Core) -> Option<String> {
        let _ = library::bind(core.stream.context());
        match core.comm.look() {
            Ok(()) | Err(Failed::Aborted) => {}
            Err(failed) => {
                if matches!(failed, Failed::Remote(_)) && heard(&self.world).is_err() {
                    self.end();
                    return None;
                }
                return Some(format!("{}: {failed}", core.label()));
            }
        }
        // The thread that issues operations frees the completed ones: it alone knows whether its
        // stream is being captured, when no memory may be freed to it.
        let is_late = |operation: &&InFlight| {
            operation.since.elapsed() > self.timeout
                && operation.done.try_is_complete() == Ok(false)
        };
        let late = lock(&core.in_flight).iter().find(is_late).map(|operation| operation.what)?;
        let seconds = self.timeout.as_secs_f64();
        Some(format!(
            "{late} on {} did not finish within {seconds:.0} s: a peer hangs or runs a different operation",
            core.label()
        ))
    }

    /// Aborts all communicators of this rank, unless an abort has begun, and waits as
    /// [`Watchdog::wait_for_end`] does. The reason is set before, in [`Watchdog::found`] or in the
    /// CPU group's verdict.
    pub fn end(self: &Arc<Self>) {
        let mut end = lock(&self.end);
        if end.began.is_none() {
            end.began = Some(Instant::now());
            self.over.store(true, Ordering::SeqCst);
            let watchdog = self.clone();
            let builder = std::thread::Builder::new().name("nccl-end".to_string());
            // On another thread, because the thread that reports the failure must not hang with the
            // abort.
            if builder.spawn(move || watchdog.abort_all()).is_err() {
                drop(end);
                return self.abort_all();
            }
        }
        drop(end);
        self.wait_for_end();
    }

    fn abort_all(&self) {
        // Kept until the aborts are complete: dropping the last handle to a group waits for them.
        let groups = self.groups();
        let comms: Vec<_> = groups.iter().map(|core| &core.comm).collect();
        library::abort(&comms);
        lock(&self.end).done = true;
        self.ended.notify_all();
    }
}

/// Waits a short time for the CPU group's verdict.
///
/// # Errors
/// The verdict.
pub fn heard(world: &Group) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < VERDICT {
        world.health()?;
        std::thread::sleep(ASK);
    }
    Ok(())
}
