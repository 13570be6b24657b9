//! Timed spans of a thread's activities: phases of a step, kernels, collectives, waits.
//!
//! Nothing is recorded unless a [`Recorder`] is entered on the thread, and nothing is summed unless
//! [`Timers`] are. A span then costs two clock readings; otherwise it costs one look at a
//! thread-local. Spans of one thread nest.
//!
//! A thread that entered with a GPU ([`Recorder::enter_on`]) records when the GPU computes the work
//! of a span, not when the host queues it. The device notes these times in passing, and they are
//! read when the recording has ended. Nothing waits for the device in between.

mod timers;

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_core::{Device, Tensor};

pub use self::timers::{Part, Sums, Timers, Timing};
#[cfg(gpu)]
use crate::tensor::gpu::{Gpu, Timestamp};

/// The category of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A part of a step that holds other spans, e.g. a forward pass.
    Phase,
    /// An operation of this crate.
    Kernel,
    /// A collective operation or message, while it moves its bytes.
    Communication,
    /// Waiting for another rank.
    Wait,
}

/// A span that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub name: &'static str,
    pub kind: Kind,
    /// Index of the recorder's thread, from 0 in the order of first entry.
    pub thread: usize,
    /// Time since the recorder was made.
    pub start: Duration,
    pub length: Duration,
    /// Floating-point operations of the span itself, by the usual count; 0 if the span is not about
    /// arithmetic.
    pub flops: u64,
    /// Bytes that the operation must at least read and write, or put on the wire.
    pub bytes: u64,
    /// Microbatch and chunk, for passes of a pipeline.
    pub place: Option<(usize, usize)>,
}

/// Shared by a recorder's threads.
struct Shared {
    begin: Instant,
    begin_unix: Duration,
    /// Names of the threads that entered.
    threads: Mutex<Vec<String>>,
    events: Mutex<Vec<Event>>,
}

/// Collects the spans of the threads that entered it.
#[derive(Clone)]
pub struct Recorder(Arc<Shared>);

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorder {
    /// An empty recorder, whose clock starts now.
    pub fn new() -> Self {
        Self(Arc::new(Shared {
            begin: Instant::now(),
            begin_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            threads: Mutex::default(),
            events: Mutex::default(),
        }))
    }

    /// The recorder of the current thread, if any, for entering on another thread that works for
    /// this one.
    pub fn current() -> Option<Self> {
        records()
            .then(|| LOCAL.with_borrow(|local| local.as_ref().map(|l| Self(l.shared.clone()))))
            .flatten()
    }

    /// Records the current thread's spans until the guard is dropped. A thread with a `name` that
    /// entered before continues the track of that name.
    pub fn enter(&self, name: &str) -> Entered {
        let mut threads = lock(&self.0.threads);
        let thread = threads.iter().position(|known| known == name).unwrap_or_else(|| {
            threads.push(name.to_string());
            threads.len() - 1
        });
        drop(threads);
        let local = Local {
            shared: self.0.clone(),
            thread,
            events: Vec::new(),
            #[cfg(gpu)]
            clock: None,
        };
        let before = LOCAL.replace(Some(local));
        LISTENERS.set(LISTENERS.get() | RECORDS);
        Entered { before }
    }

    /// As [`Recorder::enter`]. If `device` is a GPU, spans get the times at which it computes; this
    /// waits for the GPU.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn enter_on(&self, name: &str, device: &Device) -> crate::Result<Entered> {
        let entered = self.enter(name);
        #[cfg(gpu)]
        if crate::tensor::gpu::computes(device) {
            let clock = Clock::start(device, self.0.begin)?;
            LOCAL.with_borrow_mut(|local| {
                if let Some(local) = local {
                    local.clock = Some(clock);
                }
            });
        }
        let _ = device;
        Ok(entered)
    }

    /// Seconds between the Unix epoch and the recorder's zero.
    pub fn begin_unix(&self) -> Duration {
        self.0.begin_unix
    }

    /// Names of the threads that entered, by [`Event::thread`].
    pub fn threads(&self) -> Vec<String> {
        lock(&self.0.threads).clone()
    }

    /// Takes the recorded spans, by start; of two spans with the same start, the outer comes first.
    /// Threads that are still inside contribute only what they recorded before.
    pub fn take(&self) -> Vec<Event> {
        let mut events = std::mem::take(&mut *lock(&self.0.events));
        // A span ends before the spans around it. Of two with equal times, which a GPU's clock can
        // give, the later one is the outer.
        events.reverse();
        events.sort_by_key(|e| (e.thread, e.start, std::cmp::Reverse(e.length)));
        events
    }
}

/// The recording of one thread.
struct Local {
    shared: Arc<Shared>,
    thread: usize,
    events: Vec<Event>,
    #[cfg(gpu)]
    clock: Option<Clock>,
}

/// The clock of a GPU, and the timestamps to read from it.
#[cfg(gpu)]
struct Clock {
    gpu: Gpu,
    /// A time on the device, and the recorder's time at that moment.
    zero: Timestamp,
    at: Duration,
    /// Index of the event, and when the device began and ended it.
    taken: Vec<(usize, Timestamp, Timestamp)>,
}

#[cfg(gpu)]
impl Clock {
    fn start(device: &Device, begin: Instant) -> crate::Result<Self> {
        let gpu = Gpu::on(device, "trace")?;
        let zero = gpu.timestamp()?;
        zero.wait()?;
        Ok(Self { gpu, zero, at: begin.elapsed(), taken: Vec::new() })
    }

    /// Gives events the device's times. Both ends are measured from the same zero, so that rounding
    /// keeps nested spans nested.
    fn read(&self, events: &mut [Event]) -> crate::Result<()> {
        for (event, start, end) in &self.taken {
            let (start, end) = (start.since(&self.zero)?, end.since(&self.zero)?);
            (events[*event].start, events[*event].length) =
                (self.at + start, end.saturating_sub(start));
        }
        Ok(())
    }
}

/// A recorder hears the thread's spans.
const RECORDS: u8 = 1;
/// Timers hear the thread's spans.
const TIMES: u8 = 2;

thread_local! {
    /// Who hears the thread's spans.
    static LISTENERS: Cell<u8> = const { Cell::new(0) };
    static LOCAL: RefCell<Option<Local>> = const { RefCell::new(None) };
}

fn records() -> bool {
    LISTENERS.get() & RECORDS != 0
}

/// Runs `f` without hearing its spans.
pub fn unheard<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(u8);
    impl Drop for Restore {
        fn drop(&mut self) {
            LISTENERS.set(self.0);
        }
    }
    let _restore = Restore(LISTENERS.replace(0));
    f()
}

/// The current thread records while this lives.
#[must_use = "recording ends when this is dropped"]
pub struct Entered {
    before: Option<Local>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let records = if self.before.is_some() { RECORDS } else { 0 };
        LISTENERS.set((LISTENERS.get() & !RECORDS) | records);
        if let Some(local) = LOCAL.replace(self.before.take()) {
            #[cfg(gpu)]
            let local = {
                let mut local = local;
                // A failing device reports its error where its results are needed. Here the events
                // keep the host's times.
                let read = local.clock.as_ref().map(|clock| clock.read(&mut local.events));
                drop(read);
                local
            };
            lock(&local.shared.events).extend(local.events);
        }
    }
}

/// A span that lasts until it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct Span(Option<Open>);

struct Open {
    /// What a recorder is told.
    recorded: Option<Recorded>,
    /// The part that the thread's time counted to before, if it counts to another one in the span.
    before: Option<Part>,
}

struct Recorded {
    name: &'static str,
    kind: Kind,
    start: Instant,
    /// The start on a GPU.
    #[cfg(gpu)]
    there: Option<Timestamp>,
    flops: u64,
    bytes: u64,
    place: Option<(usize, usize)>,
}

/// Begins a span on this thread.
#[inline]
pub fn span(name: &'static str, kind: Kind) -> Span {
    if LISTENERS.get() == 0 { Span(None) } else { heard(name, kind, None) }
}

/// Begins a span whose time counts to `part` of a step.
#[inline]
pub fn timed(name: &'static str, kind: Kind, part: Part) -> Span {
    if LISTENERS.get() == 0 { Span(None) } else { heard(name, kind, Some(part)) }
}

fn heard(name: &'static str, kind: Kind, part: Option<Part>) -> Span {
    let before = part.filter(|_| LISTENERS.get() & TIMES != 0).and_then(timers::switch);
    let recorded = records().then(|| Recorded {
        name,
        kind,
        start: Instant::now(),
        #[cfg(gpu)]
        there: LOCAL.with_borrow(|local| timestamp(local.as_ref()?)),
        flops: 0,
        bytes: 0,
        place: None,
    });
    let is_heard = recorded.is_some() || before.is_some();
    Span(is_heard.then_some(Open { recorded, before }))
}

/// The time on the thread's GPU, if the thread records a GPU.
#[cfg(gpu)]
fn timestamp(local: &Local) -> Option<Timestamp> {
    local.clock.as_ref().and_then(|clock| clock.gpu.timestamp().ok())
}

/// Begins the span of a kernel that computes `flops` operations and touches `bytes` bytes.
#[inline]
pub fn kernel(name: &'static str, flops: usize, bytes: usize) -> Span {
    span(name, Kind::Kernel).work(flops, bytes)
}

/// Begins the span of a kernel that reads or writes these tensors, each once.
#[inline]
pub(crate) fn moves(name: &'static str, tensors: &[&Tensor]) -> Span {
    if !records() {
        return Span(None);
    }
    kernel(name, 0, bytes(tensors))
}

/// Begins the span of a product of `rows`, each multiplied by the whole `matrix`.
#[inline]
pub(crate) fn product(name: &'static str, rows: &Tensor, matrix: &Tensor) -> Span {
    if !records() {
        return Span(None);
    }
    let num_rows = rows.elem_count() / rows.dims().last().copied().unwrap_or(1).max(1);
    kernel(name, 2 * num_rows * matrix.elem_count(), bytes(&[rows, matrix]))
}

/// Bytes of all elements.
pub(crate) fn bytes(tensors: &[&Tensor]) -> usize {
    tensors.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
}

impl Span {
    fn recorded(&mut self) -> Option<&mut Recorded> {
        self.0.as_mut()?.recorded.as_mut()
    }

    /// Sets the span's amount of work.
    #[inline]
    pub fn work(mut self, flops: usize, bytes: usize) -> Self {
        if let Some(recorded) = self.recorded() {
            (recorded.flops, recorded.bytes) = (flops as u64, bytes as u64);
        }
        self
    }

    /// Sets the microbatch and chunk of a pipeline pass.
    #[inline]
    pub fn at(mut self, microbatch: usize, chunk: usize) -> Self {
        if let Some(recorded) = self.recorded() {
            recorded.place = Some((microbatch, chunk));
        }
        self
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if let Some(Open { recorded, before }) = self.0.take() {
            recorded.into_iter().for_each(Recorded::end);
            before.into_iter().for_each(timers::back_to);
        }
    }
}

impl Recorded {
    fn end(self) {
        let end = Instant::now();
        LOCAL.with_borrow_mut(|local| {
            let Some(local) = local else { return };
            #[cfg(gpu)]
            if let Some((start, end)) = self.there.zip(timestamp(local))
                && let Some(clock) = &mut local.clock
            {
                clock.taken.push((local.events.len(), start, end));
            }
            local.events.push(Event {
                name: self.name,
                kind: self.kind,
                thread: local.thread,
                start: self.start.saturating_duration_since(local.shared.begin),
                length: end - self.start,
                flops: self.flops,
                bytes: self.bytes,
                place: self.place,
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_recorded_outside() {
        drop(span("before", Kind::Phase));
        let recorder = Recorder::new();
        drop(recorder.enter("main"));
        drop(span("after", Kind::Phase));
        assert!(recorder.take().is_empty());
        assert!(Recorder::current().is_none());
    }

    #[test]
    fn spans_nest_and_carry_their_work() {
        let recorder = Recorder::new();
        let entered = recorder.enter("main");
        {
            let _outer = span("forward", Kind::Phase).at(3, 1);
            let _inner = kernel("linear", 10, 20);
        }
        drop(entered);
        let events = recorder.take();
        assert_eq!(events.iter().map(|e| e.name).collect::<Vec<_>>(), ["forward", "linear"]);
        let (outer, inner) = (&events[0], &events[1]);
        assert!(
            outer.start <= inner.start && inner.start + inner.length <= outer.start + outer.length
        );
        assert_eq!((outer.place, inner.flops, inner.bytes), (Some((3, 1)), 10, 20));
        assert!(recorder.take().is_empty());
    }

    #[test]
    fn another_thread_has_a_track_of_its_own_and_continues_it() {
        let recorder = Recorder::new();
        let _entered = recorder.enter("main");
        let handed = Recorder::current().expect("the thread records");
        std::thread::spawn(move || {
            for _ in 0..2 {
                let _entered = handed.enter("comm");
                drop(span("all_reduce", Kind::Communication));
            }
        })
        .join()
        .expect("no panic");
        assert_eq!(recorder.threads(), ["main", "comm"]);
        assert_eq!(recorder.take().iter().map(|e| e.thread).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn entering_within_another_recording_returns_to_it() {
        let (outer, inner) = (Recorder::new(), Recorder::new());
        let entered = outer.enter("main");
        let nested = inner.enter("main");
        drop(span("inside", Kind::Phase));
        drop(nested);
        drop(span("outside", Kind::Phase));
        drop(entered);
        assert_eq!(inner.take().iter().map(|e| e.name).collect::<Vec<_>>(), ["inside"]);
        assert_eq!(outer.take().iter().map(|e| e.name).collect::<Vec<_>>(), ["outside"]);
    }
}
