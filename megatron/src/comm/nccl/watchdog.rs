//! Sees to it that no rank hangs: polls NCCL's errors, the age of what is queued, and the CPU's
//! verdict, and ends all communicators together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::core::{Core, InFlight};
use super::library;
use super::library::Failed;
use crate::comm::communicator::Group;
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// How often it looks.
const TICK: Duration = Duration::from_millis(100);
/// How long the CPU's transport is given to find out which rank is lost, once NCCL says that
/// something is wrong with a peer: the transport names the rank, and looks for dead processes every
/// second.
pub const VERDICT: Duration = Duration::from_secs(2);
/// How often it is asked.
pub const ASK: Duration = Duration::from_millis(20);
/// How long whoever lets go of what communicators use waits until they are aborted, counted from
/// when that began.
const ENDED_WITHIN: Duration = Duration::from_secs(3);

/// One per rank; its thread ends with it.
pub struct Watchdog {
    world: Group,
    timeout: Duration,
    cores: Mutex<Vec<Weak<Core>>>,
    /// What this rank found by itself, which is why the communicators were aborted. Where others
    /// told that the run is over, the CPU's transport knows why.
    found: OnceLock<String>,
    /// Communicators are aborted, or about to be.
    over: AtomicBool,
    end: Mutex<End>,
    ended: Condvar,
}

/// How far the end of the communicators has come.
#[derive(Default)]
struct End {
    began: Option<Instant>,
    done: bool,
}

impl Watchdog {
    /// Starts its thread.
    ///
    /// # Errors
    /// If there can be no thread.
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

    /// How long an operation may take once it is queued.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Has a group watched as long as it lives.
    pub fn watch(&self, core: &Arc<Core>) {
        let mut cores = lock(&self.cores);
        cores.retain(|core| core.strong_count() > 0);
        cores.push(Arc::downgrade(core));
        drop(cores);
        // One that was made meanwhile is not among those that were ended.
        if self.is_over() {
            core.comm.abort();
        }
    }

    /// Whether the communicators are aborted, or about to be.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// What this rank found wrong, if that ended the run.
    pub fn found(&self) -> Option<&str> {
        self.found.get().map(String::as_str)
    }

    /// Waits until the communicators are aborted, if they are to be: what they use must not go away
    /// meanwhile. An abort that hangs is given up.
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
            // Everyone hears of it by the CPU's transport already.
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

    /// What is wrong with a group, unless the CPU's transport has a verdict on it: then the
    /// communicators are aborted here.
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
        // What is done is let go by the thread that issues operations: it alone knows whether its
        // stream is being recorded, when no memory may be given back to it.
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

    /// Aborts all communicators of this rank, unless that is under way, and waits for it as
    /// [`Watchdog::wait_for_end`] does. Why, others find by [`Watchdog::found`] or the CPU's
    /// verdict, which are known before.
    pub fn end(self: &Arc<Self>) {
        let mut end = lock(&self.end);
        if end.began.is_none() {
            end.began = Some(Instant::now());
            self.over.store(true, Ordering::SeqCst);
            let watchdog = self.clone();
            let builder = std::thread::Builder::new().name("nccl-end".to_string());
            // By a thread of its own, since whoever reports the failure must not hang with it.
            if builder.spawn(move || watchdog.abort_all()).is_err() {
                drop(end);
                return self.abort_all();
            }
        }
        drop(end);
        self.wait_for_end();
    }

    fn abort_all(&self) {
        // Kept until all is done: the last handle to a group waits for that.
        let groups = self.groups();
        let comms: Vec<_> = groups.iter().map(|core| &core.comm).collect();
        library::abort(&comms);
        lock(&self.end).done = true;
        self.ended.notify_all();
    }
}

/// Waits a moment for the CPU's verdict.
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
