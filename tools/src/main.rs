//! The `megatron` program.

use kernels::tensor::huge_pages::HugePages;

#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

fn main() -> std::process::ExitCode {
    tools::main()
}
