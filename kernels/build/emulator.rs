//! Builds the kernels as a static library for the CPU, with the emulator that runs them.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fmt::Write, fs};

use crate::sources;

pub fn build() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=CXX");
    let (compiler, version) = find()?;
    let mut files = sources::files(&sources::dir(), &["cu"])?;
    files.extend(sources::files(&sources::dir().join("emulator"), &["cpp", "cu"])?);
    let compiled = sources::compile(&files, "o", &version, |file, object| {
        let stem = sources::stem(file);
        let mut command = Command::new(&compiler);
        // Contraction as in nvcc; kernels access 16-bit elements through wider types.
        command.args([
            "-std=c++17",
            "-O2",
            "-g1",
            "-fPIC",
            "-fno-strict-aliasing",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
        ]);
        command.args([
            "-Wno-unused-function",
            "-Wno-unused-variable",
            "-Wno-psabi",
            "-x",
            "c++",
            "-DEMULATED",
        ]);
        command.arg(format!("-DEMULATED_KERNELS=emulated_{stem}"));
        command
            .arg("-I")
            .arg(sources::dir().join("include"))
            .arg("-c")
            .arg(file)
            .arg("-o")
            .arg(object);
        command
    })?;
    let library = sources::out_dir().join("libkernels_emulated.a");
    let _ = fs::remove_file(&library);
    let archive = Command::new("ar")
        .arg("crs")
        .arg(&library)
        .args(compiled.iter().map(|file| &file.object))
        .status();
    if !archive.as_ref().is_ok_and(std::process::ExitStatus::success) {
        return Err(format!("ar could not write {}: {archive:?}", library.display()));
    }
    println!("cargo::rustc-link-search=native={}", sources::out_dir().display());
    println!("cargo::rustc-link-lib=static=kernels_emulated");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    let stems: Vec<&str> =
        compiled.iter().map(|file| file.stem.as_str()).filter(|stem| *stem != "emulator").collect();
    let mut modules = String::from("use super::emulated::List;\n\nunsafe extern \"C\" {\n");
    for stem in &stems {
        let _ = writeln!(modules, "    safe static emulated_{stem}: List;");
    }
    modules.push_str("}\n\npub static MODULES: &[(&str, &List)] = &[\n");
    for stem in &stems {
        let _ = writeln!(modules, "    ({stem:?}, &emulated_{stem}),");
    }
    modules.push_str("];\n");
    for file in &compiled {
        for line in file
            .messages
            .lines()
            .filter(|line| line.contains("warning:") || line.contains("error:"))
        {
            println!("cargo::warning={line}");
        }
    }
    sources::write_modules(&modules)
}

/// A C++ compiler, and its version output.
fn find() -> Result<(PathBuf, String), String> {
    let candidates: Vec<PathBuf> = env::var_os("CXX")
        .into_iter()
        .map(PathBuf::from)
        .chain(["g++", "c++", "clang++"].map(PathBuf::from))
        .collect();
    for compiler in candidates {
        if let Ok(output) = Command::new(&compiler).arg("--version").output()
            && output.status.success()
        {
            return Ok((compiler, String::from_utf8_lossy(&output.stdout).into_owned()));
        }
    }
    Err("the feature `emulated` needs a C++17 compiler: install g++ (apt-get install g++), or set CXX".to_string())
}
