//! Sees to it that no rank hangs: polls NCCL's errors, the age of what is queued, and the CPU's verdict, and ends all communicators together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::{Core, InFlight, library};
use crate::comm::communicator::Group;
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// How often it looks.
const TICK: Duration = Duration::from_millis(100);

/// One per rank; its thread ends with it.
pub struct Watchdog {
    world: Group,
    timeout: Duration,
    cores: Mutex<Vec<Weak<Core>>>,
    over: AtomicBool,
}

impl Watchdog {
    /// Starts its thread.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(world: Group, timeout: Duration) -> Result<Arc<Self>> {
        let watchdog = Arc::new(Self { world, timeout, cores: Mutex::default(), over: AtomicBool::new(false) });
        let watched = Arc::downgrade(&watchdog);
        let thread = move || {
            while let Some(watchdog) = watched.upgrade() {
                watchdog.look();
                drop(watchdog);
                std::thread::sleep(TICK);
            }
        };
        let builder = std::thread::Builder::new().name("nccl-watchdog".to_string());
        builder.spawn(thread).map_err(|e| Error::comm(format!("cannot start NCCL's watchdog: {e}")))?;
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
        if self.over.load(Ordering::SeqCst) {
            core.break_for("the run is over");
            core.comm.abort();
        }
    }

    fn groups(&self) -> Vec<Arc<Core>> {
        lock(&self.cores).iter().filter_map(Weak::upgrade).collect()
    }

    fn look(&self) {
        if self.over.load(Ordering::SeqCst) {
            return;
        }
        if let Err(verdict) = self.world.health() {
            // Everyone hears of it by the CPU's transport already.
            return self.end(&verdict.to_string());
        }
        for core in self.groups() {
            let _ = library::bind(core.stream.context());
            // What is done is let go by the thread that issues operations: it alone knows whether its stream is being recorded, when no memory
            // may be given back to it.
            let is_late = |operation: &&InFlight| {
                operation.since.elapsed() > self.timeout && operation.done.try_is_complete() == Ok(false)
            };
            let late = lock(&core.in_flight).iter().find(is_late).map(|operation| operation.what);
            let found = match (core.comm.is_ready(), late) {
                (Err(error), _) => Some(format!("{}: {error}", core.label())),
                (_, Some(what)) => {
                    let seconds = self.timeout.as_secs_f64();
                    Some(format!(
                        "{what} on {} was not done within {seconds:.0} s: a peer hangs or is elsewhere",
                        core.label()
                    ))
                }
                _ => None,
            };
            if let Some(why) = found {
                self.world.abort(&why);
                return self.end(&why);
            }
        }
    }

    /// Aborts all communicators of this rank.
    pub fn end(&self, why: &str) {
        if self.over.swap(true, Ordering::SeqCst) {
            return;
        }
        let groups = self.groups();
        // Who asks why finds it, however long the rest takes.
        groups.iter().for_each(|core| core.break_for(why));
        let comms: Vec<_> = groups.iter().map(|core| &core.comm).collect();
        library::abort(&comms);
    }
}
