//! Operations on tile registers, in assembly: the intrinsics are not stable.

use half::bf16;
use std::arch::asm;

/// Elements of `k` per tile instruction.
pub(super) const STEP: usize = 32;
/// Steps per block of `k`: a staged panel then takes 32 KiB of the 48 KiB L1 and is reused by all x tiles of the task.
pub(super) const BLOCK_STEPS: usize = 16;
/// Rows of w per panel: two tiles, so that each x tile that is loaded is used twice.
pub(super) const N_TILE: usize = 32;
/// u32 or f32 elements of a tile.
pub(super) const TILE: usize = 256;
/// A block of `k` of a panel, `[step, 32 w rows, 32 k]` bf16: what the left tiles are loaded from.
#[repr(C, align(64))]
pub(super) struct Panel(pub(super) [[[u16; STEP]; N_TILE]; BLOCK_STEPS]);

/// Sets all eight tile registers to 16 rows of 64 bytes.
///
/// # Safety
/// The CPU has AMX and the process the permission to use it.
pub(super) unsafe fn configure() {
    /// The operand of `ldtilecfg` (Intel SDM, vol. 1, 18.3).
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    config.bytes_per_row[..8].fill(64);
    config.rows[..8].fill(16);
    // SAFETY: reads the 64 bytes of the configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags)) };
}

/// Gives the tile state back, so that context switches need not save it.
///
/// # Safety
/// The CPU has AMX; the tiles hold nothing that is still needed.
pub(super) unsafe fn release() {
    // SAFETY: touches tile registers only.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

/// Source of the left tiles: two tiles of 16 rows of w.
#[derive(Clone, Copy)]
pub(super) struct Left {
    w0: *const u8,
    w1: *const u8,
    /// Bytes from one row to the next.
    row: usize,
    /// Bytes from one step to the next.
    step: usize,
}

impl Left {
    /// A staged panel.
    pub(super) fn panel(panel: &Panel) -> Self {
        let w0 = panel.0.as_ptr().cast::<u8>();
        Self { w0, w1: w0.wrapping_add(N_TILE * STEP), row: STEP * 2, step: N_TILE * STEP * 2 }
    }

    /// 32 rows of `w`, `[.., k]`.
    pub(super) fn rows(w: &[bf16], k: usize) -> Self {
        let w = &w[..N_TILE * k];
        Self { w0: w.as_ptr().cast(), w1: w[N_TILE / 2 * k..].as_ptr().cast(), row: k * 2, step: STEP * 2 }
    }
}

/// Defines the inner loops: sums of two w tiles with two x tiles or one; `$fetch` is what to fetch in a step.
macro_rules! add_products {
    ($two:ident, $one:ident, [$($fetch:literal)*]) => {
        /// Adds the products of 32 w rows with two x tiles.
        ///
        /// # Safety
        /// The tiles are configured; the operands have `steps` (at least 1) steps.
        pub(super) unsafe fn $two(
            w: Left,
            x0: *const u32,
            x1: *const u32,
            steps: usize,
            next: *const bf16,
            sums0: &mut [f32; 2 * TILE],
            sums1: &mut [f32; 2 * TILE],
        ) {
            // SAFETY: reads the operands inside their bounds and updates the sums; a prefetch may point anywhere.
            unsafe {
                asm!(
                    "tileloadd tmm0, [{s0} + {row}*1]",
                    "tileloadd tmm1, [{s0} + {row}*1 + 1024]",
                    "tileloadd tmm2, [{s1} + {row}*1]",
                    "tileloadd tmm3, [{s1} + {row}*1 + 1024]",
                    "2:",
                    "tileloadd tmm4, [{w0} + {w_row}*1]",
                    "tileloadd tmm6, [{x0} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{w1} + {w_row}*1]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "tileloadd tmm7, [{x1} + {row}*1]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    $(concat!("prefetcht1 byte ptr [{next} + 64*", $fetch, "]"),)*
                    "add {w0}, {w_step}",
                    "add {w1}, {w_step}",
                    "add {x0}, 1024",
                    "add {x1}, 1024",
                    "add {next}, 2048",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{s0} + {row}*1], tmm0",
                    "tilestored [{s0} + {row}*1 + 1024], tmm1",
                    "tilestored [{s1} + {row}*1], tmm2",
                    "tilestored [{s1} + {row}*1 + 1024], tmm3",
                    w0 = inout(reg) w.w0 => _,
                    w1 = inout(reg) w.w1 => _,
                    w_row = in(reg) w.row,
                    w_step = in(reg) w.step,
                    x0 = inout(reg) x0 => _,
                    x1 = inout(reg) x1 => _,
                    next = inout(reg) next => _,
                    steps = inout(reg) steps => _,
                    s0 = in(reg) sums0.as_mut_ptr(),
                    s1 = in(reg) sums1.as_mut_ptr(),
                    row = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }

        /// Adds the products of 32 w rows with one x tile.
        ///
        /// # Safety
        /// The tiles are configured; the operands have `steps` (at least 1) steps.
        pub(super) unsafe fn $one(w: Left, x: *const u32, steps: usize, next: *const bf16, sums: &mut [f32; 2 * TILE]) {
            // SAFETY: reads the operands inside their bounds and updates the sums; a prefetch may point anywhere.
            unsafe {
                asm!(
                    "tileloadd tmm0, [{s} + {row}*1]",
                    "tileloadd tmm1, [{s} + {row}*1 + 1024]",
                    "2:",
                    "tileloadd tmm6, [{x} + {row}*1]",
                    "tileloadd tmm4, [{w0} + {w_row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{w1} + {w_row}*1]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    $(concat!("prefetcht1 byte ptr [{next} + 64*", $fetch, "]"),)*
                    "add {w0}, {w_step}",
                    "add {w1}, {w_step}",
                    "add {x}, 1024",
                    "add {next}, 2048",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{s} + {row}*1], tmm0",
                    "tilestored [{s} + {row}*1 + 1024], tmm1",
                    w0 = inout(reg) w.w0 => _,
                    w1 = inout(reg) w.w1 => _,
                    w_row = in(reg) w.row,
                    w_step = in(reg) w.step,
                    x = inout(reg) x => _,
                    next = inout(reg) next => _,
                    steps = inout(reg) steps => _,
                    s = in(reg) sums.as_mut_ptr(),
                    row = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack),
                );
            }
        }
    };
}

add_products!(add_products_2, add_products_1, []);
add_products!(
    add_products_2_and_fetch,
    add_products_1_and_fetch,
    [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]
);
