//! Machine code for GPUs: a fatbin per file, for sm_80 and sm_90a, with PTX for later
//! architectures.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt::Write};

use crate::sources::{self, Compiled};

/// Architectures of every fatbin; files that end in `_sm90a` are for Hopper only.
const EVERYWHERE: &[&str] = &[
    "arch=compute_80,code=sm_80",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_80,code=compute_80",
];
const HOPPER: &[&str] = &["arch=compute_90a,code=sm_90a"];

const HOW_TO_GET: &str = "The feature `cuda` needs NVIDIA's CUDA toolkit, version 13.\n\
    Where one is installed, set CUDA_HOME to it. Where none is, make one from PyPI's packages, no GPU or driver needed:\n\
    tools/cuda/toolkit.sh target/cuda && source target/cuda/env.sh";

pub fn build() -> Result<(), String> {
    for variable in ["CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let (nvcc, version) = find()?;
    // On other architectures the libraries are linked in the ordinary way.
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        crate::libraries::build(&nvcc, &version)?;
    }
    let files = sources::files(&sources::dir(), &["cu"])?;
    let compiled = sources::compile(&files, "fatbin", &version, |file, object| {
        let mut command = Command::new(&nvcc);
        command.args(["-std=c++17", "-O3", "-lineinfo", "-fatbin", "-Xptxas", "-v"]);
        for code in if sources::stem(file).ends_with("_sm90a") { HOPPER } else { EVERYWHERE } {
            command.args(["-gencode", code]);
        }
        command.arg("-I").arg(sources::dir().join("include")).arg(file).arg("-o").arg(object);
        command
    })?;
    // Images consist of 8-byte words, and `include_bytes` does not guarantee alignment.
    let mut modules = String::from(
        "#[repr(C, align(64))]\nstruct Aligned<T>(T);\n\npub static MODULES: &[(&str, &[u8])] = &[\n",
    );
    for file in &compiled {
        report(file);
        if file.stem.ends_with("_sm90a") {
            check_registers(file)?;
        }
        let _ = writeln!(
            modules,
            "    ({:?}, &Aligned(*include_bytes!({:?})).0),",
            file.stem,
            file.object.display().to_string()
        );
    }
    modules.push_str("];\n");
    sources::write_modules(&modules)
}

/// nvcc, and its version output.
fn find() -> Result<(PathBuf, String), String> {
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(env::var_os)
        .map(|home| Path::new(&home).join("bin/nvcc"));
    let candidates: Vec<PathBuf> =
        homes.chain([PathBuf::from("nvcc"), PathBuf::from("/usr/local/cuda/bin/nvcc")]).collect();
    for nvcc in &candidates {
        if let Ok(output) = Command::new(nvcc).arg("--version").output()
            && output.status.success()
        {
            return Ok((nvcc.clone(), String::from_utf8_lossy(&output.stdout).into_owned()));
        }
    }
    let tried: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
    Err(format!("found no nvcc (looked for {}).\n{HOW_TO_GET}", tried.join(", ")))
}

/// Warns of kernels that spill registers to memory, and of ptxas notes on asynchronous products. If
/// ptxas serializes them, it only reports "info" (C7510 and the following numbers).
fn report(file: &Compiled) {
    let (mut kernel, mut code) = ("?", "?");
    for line in file.messages.lines() {
        // ptxas info    : Compiling entry function 'gelu_f32' for 'sm_80'
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let mut quoted = rest.split('\'');
            (kernel, code) = (quoted.next().unwrap_or("?"), quoted.nth(1).unwrap_or("?"));
        }
        // 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        if line.contains("bytes stack frame")
            && line.split(',').any(|part| !part.trim_start().starts_with("0 bytes"))
        {
            println!("cargo::warning={}.cu: {kernel} for {code}: {}", file.stem, line.trim());
        }
        if line.contains("warning") || line.contains("(C75") {
            println!("cargo::warning={}.cu: {}", file.stem, line.trim());
        }
    }
}

/// Registers per thread with which Hopper's kernels must start: all of a multiprocessor's. One
/// warpgroup then gives up all but 24, and the others take them. With fewer registers at the start,
/// they would wait for ever.
fn registers(threads: u32) -> u32 {
    65536 / threads / 8 * 8
}

/// Threads per block: three warpgroups, or four.
fn threads(kernel: &str) -> u32 {
    if kernel.ends_with("_64") && !kernel.starts_with("attention_dkdv") { 512 } else { 384 }
}

/// Refuses kernels that would hang.
fn check_registers(file: &Compiled) -> Result<(), String> {
    let mut kernel = "?";
    for line in file.messages.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or("?");
        }
        // ptxas info    : Used 168 registers, used 16 barriers
        let used = line.split_once("Used ").and_then(|(_, rest)| rest.split_once(" registers"));
        let needed = registers(threads(kernel));
        if let Some((used, _)) = used
            && used.parse() != Ok(needed)
        {
            return Err(format!(
                "{}.cu: this nvcc has {kernel} begin with {used} registers a thread; it needs {needed}, or would wait for ever.\n\
                 Build with nvcc 13.0 (tools/cuda/toolkit.sh makes one), and please report this.",
                file.stem
            ));
        }
    }
    Ok(())
}
