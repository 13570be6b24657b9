//! The `megatron` program.

fn main() -> std::process::ExitCode {
    tools::main()
}
