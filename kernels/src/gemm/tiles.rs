//! The tile registers of AMX: how they are set up, and given back.

use std::arch::asm;

/// What LDTILECFG loads: palette 1, all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config([u8; 64]);

const CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Config(bytes)
};

/// Gives the thread its tiles.
///
/// # Safety
/// The machine has AMX, and the operating system gave its permission.
pub unsafe fn configure() {
    // SAFETY: the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, preserves_flags)) }
}

/// Puts the tiles back into their initial state, which makes context switches cheap again.
///
/// # Safety
/// The machine has AMX.
pub unsafe fn release() {
    // SAFETY: nothing of the tiles is used any more.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}
