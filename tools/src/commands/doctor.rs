//! `megatron doctor`: reports what this program finds and would use on this machine, for bug
//! reports.

use clap::Args;
use kernels::Isa;

use crate::commands::bench::{ceilings, machine_line};
use crate::error::Result;
use crate::report::table::significant;

/// Report what this program finds on this machine: processors, GPUs, libraries, and their speed
///
/// A missing GPU or library is not an error: the report says what is missing and what to do.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Skip the measurements, which take a few seconds and mean little while other programs run
    #[arg(long)]
    pub quick: bool,
}

/// Prints the report.
///
/// # Errors
/// If threads cannot be started.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let mut report = Report { lines: vec![machine_line()] };
    report.cpu(args)?;
    report.gpus(args);
    crate::print_line(&report.lines.join("\n"));
    Ok(())
}

struct Report {
    lines: Vec<String>,
}

impl Report {
    fn line(&mut self, what: &str, said: impl AsRef<str>) {
        self.lines.push(format!("{what:<18} {}", said.as_ref()));
    }

    fn cpu(&mut self, args: &DoctorArgs) -> Result<()> {
        let threads = crate::ranks::use_threads(None, 1)?;
        let (used, all) = (Isa::detected(), Isa::supported());
        let lowered = if used == all {
            String::new()
        } else {
            format!(" (MEGATRON_SIMD; the machine has {})", all.name())
        };
        let parts = if used == Isa::Amx { " (fp32 and fp16 as sums of bf16)" } else { "" };
        self.line("cpu kernels", format!("{}{parts}{lowered}, {threads} threads", used.name()));
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| {
            let line = memory.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_matches([':', ' ']).split(' ').next()?.parse::<f64>().ok()
        };
        if let (Some(total), Some(free)) = (kib("MemTotal"), kib("MemAvailable")) {
            let gib = |kib: f64| kib / f64::from(1 << 20);
            self.line("memory", format!("{:.1} GiB, {:.1} available", gib(total), gib(free)));
        }
        if !args.quick {
            let (product, copy) = ceilings()?;
            let (product, copy) = (significant(product), significant(copy));
            self.line(
                "cpu measured",
                format!("f32 product {product} GFLOP/s, copy {copy} GB/s read + written"),
            );
        }
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    fn gpus(&mut self, _args: &DoctorArgs) {
        if let Err(error) = kernels::tensor::device::gpus() {
            self.line("gpus", error.to_string());
        }
    }

    #[cfg(feature = "cuda")]
    fn gpus(&mut self, args: &DoctorArgs) {
        use kernels::ops::survey::{compiled, survey};
        let files: Vec<&str> = compiled().iter().map(|(file, _)| *file).collect();
        let bytes: usize = compiled().iter().map(|(_, bytes)| bytes).sum();
        self.line(
            "gpu kernels",
            format!(
                "{} ({:.1} MB for sm_80, sm_90a and as PTX)",
                files.join(", "),
                bytes as f64 / 1e6
            ),
        );
        self.nccl();
        let survey = match survey() {
            Ok(survey) => survey,
            Err(error) => return self.line("gpus", error.to_string()),
        };
        let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        self.line(
            "driver",
            format!("for CUDA {}, cuBLASLt {}", version(survey.driver), survey.cublas_lt),
        );
        if survey.gpus.is_empty() {
            self.line(
                "gpus",
                "the driver is installed, but it shows no GPU (check CUDA_VISIBLE_DEVICES)",
            );
        }
        for (i, gpu) in survey.gpus.iter().enumerate() {
            let (major, minor) = gpu.capability;
            let gib = gpu.memory as f64 / f64::from(1 << 30);
            let l2 = gpu.l2 >> 20;
            self.line(
                &format!("cuda:{i}"),
                format!(
                    "{}, sm_{major}{minor}, {} multiprocessors, {gib:.1} GiB, {l2} MiB L2",
                    gpu.name, gpu.multiprocessors
                ),
            );
            self.line("  kernels", kernels_for(gpu.capability));
            let peers =
                gpu.peers.iter().enumerate().filter(|(other, reads)| *other != i && **reads);
            let peers: Vec<String> = peers.map(|(other, _)| format!("cuda:{other}")).collect();
            if survey.gpus.len() > 1 {
                self.line(
                    "  reads directly",
                    if peers.is_empty() { "no other".to_string() } else { peers.join(", ") },
                );
            }
            if !args.quick {
                let speeds = kernels::tensor::gpu::open(i)
                    .and_then(|device| kernels::ops::survey::measure(&device));
                self.line(
                    "  measured",
                    match speeds {
                        Ok(s) => format!(
                            "bf16 product {} TFLOP/s, f32 product {} TFLOP/s, copy {} GB/s read + written",
                            significant(s.bf16 / 1e12),
                            significant(s.f32 / 1e12),
                            significant(s.copy / 1e9),
                        ),
                        Err(error) => error.to_string(),
                    },
                );
            }
        }
    }

    #[cfg(feature = "nccl")]
    fn nccl(&mut self) {
        match megatron::comm::nccl::version() {
            Ok(v) => self.line("nccl", format!("{}.{}.{}", v / 10000, v / 100 % 100, v % 100)),
            Err(error) => self.line("nccl", error.to_string()),
        }
    }

    #[cfg(all(feature = "cuda", not(feature = "nccl")))]
    fn nccl(&mut self) {
        self.line(
            "nccl",
            "this program was built without it: ranks exchange GPU tensors through host memory",
        );
    }
}

/// Which code a GPU of this compute capability runs, and why.
#[cfg(feature = "cuda")]
fn kernels_for(capability: (i32, i32)) -> String {
    match capability {
        (9, 0) => "machine code for sm_90a: all of Hopper's instructions".to_string(),
        (8, _) => "machine code for sm_80".to_string(),
        (major, _) if major > 9 => {
            "PTX of sm_80, which the driver compiles at the first start: neither sm_80's nor sm_90a's machine code runs here".to_string()
        }
        (major, minor) => format!("none: compute capability {major}.{minor} is older than 8.0 (Ampere)"),
    }
}
