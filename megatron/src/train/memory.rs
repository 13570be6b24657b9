//! Memory of this process.

use crate::config::RunConfig;
use crate::{Error, Result};

/// Largest resident set so far, in bytes (`VmHWM` of Linux's `/proc/self/status`); 0 where the system does not tell.
pub fn peak_memory() -> u64 {
    bytes("/proc/self/status", "VmHWM:")
}

/// The value of a line such as `VmHWM:    1234 kB`; 0 if there is none.
fn bytes(file: &str, key: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Refuses models of which one rank's weights and gradients alone exceed the machine's memory, before anything is
/// allocated: the system would otherwise kill the run, or the machine, midway.
///
/// # Errors
/// Naming both numbers.
pub fn require_memory(config: &RunConfig) -> Result<()> {
    let (m, p) = (&config.model, &config.parallel);
    // A lower bound, in floating point because sizes that are wrong by typing overflow integers.
    let [layers, hidden, ffn, vocab] =
        [m.num_layers, m.hidden_size, m.ffn_hidden_size, m.vocab_size].map(|size| size as f64);
    let params = layers * 2.0 * hidden * ffn + vocab * hidden;
    let ranks = (p.tensor_model_parallel_size * p.pipeline_model_parallel_size) as f64;
    let (needed, there) = (params / ranks * 8.0, bytes("/proc/meminfo", "MemTotal:") as f64);
    if there > 0.0 && needed > there {
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        return Err(Error::config(format!(
            "num_layers = {}, hidden_size = {}, ffn_hidden_size = {} and vocab_size = {} make weights and gradients of \
             {:.1} GiB per rank (tensor_model_parallel_size = {} · pipeline_model_parallel_size = {}), and this machine \
             has {:.1} GiB of memory; make the model smaller or cut it over more machines",
            m.num_layers,
            m.hidden_size,
            m.ffn_hidden_size,
            m.vocab_size,
            gib(needed),
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            gib(there)
        )));
    }
    Ok(())
}
