//! Compiles the kernels of `cuda/`: with nvcc for GPUs (feature `cuda`), or with a C++ compiler for
//! the emulator (feature `emulated`).
//!
//! Without these features it does nothing and needs nothing.

mod emulator;
mod libraries;
mod nvcc;
mod sources;

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rustc-check-cfg=cfg(gpu)");
    let has = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    let result = match (has("CUDA"), has("EMULATED")) {
        (false, false) => return,
        (true, true) => {
            Err("the features `cuda` and `emulated` exclude each other: kernels run on a GPU or on its emulator"
                .to_string())
        }
        (true, false) => nvcc::build(),
        (false, true) => emulator::build(),
    };
    println!("cargo::rustc-cfg=gpu");
    if let Err(message) = result {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}
