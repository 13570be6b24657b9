//! Runs a group's collectives one after the other, in the order issued, beside the computation.
//!
//! A worker thread makes progress when nobody waits. Whoever waits runs the front of the queue itself, so an operation
//! that is waited for at once costs no hand-over between threads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::communicator::{Pending, Work};
use super::inbox::lock;
use crate::{Error, Result};

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

struct Task {
    job: Mutex<Option<Job>>,
    result: Mutex<Option<Result<()>>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Task>>,
    running: bool,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Runs the queue until `enough`, sleeping while others run it.
    fn drive(&self, enough: impl Fn(&State) -> bool) {
        let mut state = lock(&self.state);
        while !enough(&state) {
            let next = if state.running { None } else { state.queue.pop_front() };
            state = match next {
                Some(task) => {
                    state.running = true;
                    drop(state);
                    task.run();
                    let mut state = lock(&self.state);
                    state.running = false;
                    self.changed.notify_all();
                    state
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Task {
    fn run(&self) {
        let Some(job) = lock(&self.job).take() else { return };
        let result = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|_| {
            Err(Error::comm("a collective panicked; this is a defect of the runtime, please report it"))
        });
        *lock(&self.result) = Some(result);
    }
}

/// The queue of one group and its worker thread, which starts with the first operation.
#[derive(Default)]
pub(crate) struct Executor {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Executor {
    /// Queues `job`; operations of one thread run in the order it submits them.
    ///
    /// # Errors
    /// If the worker thread cannot be started.
    pub fn submit(&self, name: &str, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<Work> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name(format!("comm-{name}")).spawn(move || {
                shared.drive(|state| state.stop && state.queue.is_empty() && !state.running);
            });
            *worker = Some(started.map_err(|e| Error::comm(format!("group {name}: cannot start its thread: {e}")))?);
        }
        drop(worker);
        let task = Arc::new(Task { job: Mutex::new(Some(Box::new(job))), result: Mutex::new(None) });
        lock(&self.shared.state).queue.push_back(task.clone());
        self.shared.changed.notify_all();
        Ok(Work::pending(Submitted { shared: self.shared.clone(), task }))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
        if let Some(worker) = lock(&self.worker).take() {
            // Jobs catch their panics, so there is nothing to learn from the thread's result.
            let _ = worker.join();
        }
    }
}

struct Submitted {
    shared: Arc<Shared>,
    task: Arc<Task>,
}

impl Pending for Submitted {
    fn wait(self: Box<Self>) -> Result<()> {
        self.shared.drive(|_| lock(&self.task.result).is_some());
        lock(&self.task.result).take().unwrap_or(Ok(()))
    }

    fn detach(self: Box<Self>) {}
}
