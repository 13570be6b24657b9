//! Writes the Trace Event Format of Chrome's viewer, which Perfetto also reads: complete events
//! (`ph: X`), one process per rank, times in µs.
//!
//! Source: "Trace Event Format", Google, 2016.

use std::path::Path;

use kernels::tensor::trace::{Event, Kind, Recorder};
use serde_json::{Value, json};

use super::write_file;
use crate::{Error, Result};

/// Writes one rank's trace. Times count from the Unix epoch, so that the traces of all ranks can be
/// shown on one time axis.
pub fn write(
    path: &Path,
    rank: usize,
    label: &str,
    recorder: &Recorder,
    events: &[Event],
) -> Result<()> {
    let mut entries = vec![metadata("process_name", rank, 0, json!({ "name": label }))];
    entries.push(metadata("process_sort_index", rank, 0, json!({ "sort_index": rank })));
    for (thread, name) in recorder.threads().iter().enumerate() {
        entries.push(metadata("thread_name", rank, thread, json!({ "name": name })));
        entries.push(metadata("thread_sort_index", rank, thread, json!({ "sort_index": thread })));
    }
    let zero = recorder.begin_unix().as_secs_f64() * 1e6;
    entries.extend(events.iter().map(|event| entry(event, rank, zero)));
    let trace = json!({ "displayTimeUnit": "ms", "traceEvents": entries });
    let text = serde_json::to_vec(&trace)
        .map_err(|e| Error::config(format!("cannot write a trace: {e}")))?;
    write_file(path, &text)
}

fn metadata(name: &str, rank: usize, thread: usize, args: Value) -> Value {
    json!({ "name": name, "ph": "M", "pid": rank, "tid": thread, "args": args })
}

fn entry(event: &Event, rank: usize, zero: f64) -> Value {
    let category = match event.kind {
        Kind::Phase => "phase",
        Kind::Kernel => "kernel",
        Kind::Communication => "communication",
        Kind::Wait => "wait",
    };
    let seconds = event.length.as_secs_f64().max(1e-9);
    let mut args = serde_json::Map::new();
    if let Some((microbatch, chunk)) = event.place {
        args.insert("microbatch".into(), microbatch.into());
        args.insert("chunk".into(), chunk.into());
    }
    if event.flops > 0 {
        args.insert("GFLOP/s".into(), (event.flops as f64 / seconds / 1e9).into());
    }
    if event.bytes > 0 {
        args.insert("bytes".into(), event.bytes.into());
        args.insert("GB/s".into(), (event.bytes as f64 / seconds / 1e9).into());
    }
    json!({
        "name": event.name,
        "cat": category,
        "ph": "X",
        "ts": zero + event.start.as_secs_f64() * 1e6,
        "dur": event.length.as_secs_f64() * 1e6,
        "pid": rank,
        "tid": event.thread,
        "args": args,
    })
}
