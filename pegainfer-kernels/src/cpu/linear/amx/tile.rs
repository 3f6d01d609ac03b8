//! Operations on tile registers, in assembly: the intrinsics are not stable.

use half::bf16;
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Elements of `k` per tile instruction.
pub(super) const STEP: usize = 32;
/// Steps per block of `k`: a staged panel then takes 32 KiB of the 48 KiB L1 and is reused by all x tiles of the task.
pub(super) const BLOCK_STEPS: usize = 16;
/// Rows of w per panel: two tiles, so that each loaded x tile is used twice.
pub(super) const N_TILE: usize = 32;
/// u32 or f32 elements of a tile.
pub(super) const TILE: usize = 256;
/// W rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// A block of `k` of a panel, `[step, 32 w rows, 32 k]` bf16, from which the left tiles are loaded.
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

/// Releases the tile state, so that context switches need not save it.
///
/// # Safety
/// The CPU has AMX; the tiles hold nothing that is still needed.
pub(super) unsafe fn release() {
    // SAFETY: touches tile registers only.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

/// Steps between a w row's prefetch and its use. Measured on one core of Emerald Rapids: 4 to 8 steps read 15 % faster
/// than a whole panel ahead, 2 and 16 steps 5 % slower.
const AHEAD: usize = 6;

/// 16 w rows in place, and the rows read after them.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    w: *const u8,
    /// The first of the 16 rows that follow.
    next: *const u8,
    /// Bytes from one row to the next.
    row: usize,
}

impl Rows {
    /// The first 16 rows of `w`, `[.., k]`.
    pub(super) fn new(w: &[bf16], k: usize) -> Self {
        let (rows, rest) = w.split_at(TILE_ROWS * k);
        let next = if rest.len() < rows.len() { rows } else { rest };
        Self { w: rows.as_ptr().cast(), next: next.as_ptr().cast(), row: 2 * k }
    }

    /// Asks for the beginning of the rows.
    pub(super) fn fetch(self) {
        for row in 0..TILE_ROWS {
            for step in 0..AHEAD {
                let line = self.w.wrapping_add(row * self.row + step * 2 * STEP);
                // SAFETY: a prefetch has no visible effect; SSE is available.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
            }
        }
    }

    /// Adds the products of the rows with one x tile or two, over `steps` (at least 1) steps.
    ///
    /// # Safety
    /// The tiles are configured; the rows and the x tiles have `steps` steps.
    pub(super) unsafe fn add_products(self, x: [*const u32; 2], steps: usize, sums: &mut [[f32; TILE]]) {
        let ahead = AHEAD.min(steps - 1);
        let head = steps - ahead;
        let add = |first: usize, steps: usize, fetch: *const u8, sums: &mut [[f32; TILE]]| {
            let w = self.w.wrapping_add(first * 2 * STEP);
            let x = x.map(|x| x.wrapping_add(first * TILE));
            // SAFETY: by the caller's promise.
            unsafe {
                match sums {
                    [a, b] => add_rows_2(w, self.row, fetch, x, steps, a, b),
                    sums => add_rows_1(w, self.row, fetch, x, steps, &mut sums[0]),
                }
            }
        };
        add(0, head, self.w.wrapping_add(ahead * 2 * STEP), sums);
        if ahead > 0 {
            add(head, ahead, self.next, sums);
        }
    }
}

/// Defines the inner loop over w rows in place. Rows are prefetched row by row; they are read in 16 streams, which the
/// L2 prefetcher follows.
macro_rules! add_rows {
    ($name:ident, ($($x:ident)+), ($($s:ident)+), [$($load:literal)+], [$($product:literal)+], [$($store:literal)+]) => {
        /// Adds the products of 16 w rows with x tiles. `fetch`: address to prefetch in the first row meanwhile.
        ///
        /// # Safety
        /// The tiles are configured; the operands have `steps` (at least 1) steps.
        unsafe fn $name(
            w: *const u8,
            w_row: usize,
            fetch: *const u8,
            [$($x,)+ ..]: [*const u32; 2],
            steps: usize,
            $($s: &mut [f32; TILE],)+
        ) {
            // SAFETY: reads the operands inside their bounds and updates the sums; a prefetch may point anywhere.
            unsafe {
                asm!(
                    $($load,)+
                    "2:",
                    "tileloadd tmm4, [{w} + {w_row}*1]",
                    "mov {line}, {fetch}",
                    "mov {rows:e}, 4",
                    "3:",
                    "prefetcht0 byte ptr [{line}]",
                    "prefetcht0 byte ptr [{line} + {w_row}]",
                    "lea {line}, [{line} + 2*{w_row}]",
                    "prefetcht0 byte ptr [{line}]",
                    "prefetcht0 byte ptr [{line} + {w_row}]",
                    "lea {line}, [{line} + 2*{w_row}]",
                    "dec {rows:e}",
                    "jnz 3b",
                    $($product,)+
                    "add {w}, 64",
                    "add {fetch}, 64",
                    $(concat!("add {", stringify!($x), "}, 1024"),)+
                    "dec {steps}",
                    "jnz 2b",
                    $($store,)+
                    w = inout(reg) w => _,
                    w_row = in(reg) w_row,
                    fetch = inout(reg) fetch => _,
                    line = out(reg) _,
                    rows = out(reg) _,
                    $($x = inout(reg) $x => _,)+
                    steps = inout(reg) steps => _,
                    $($s = in(reg) $s.as_mut_ptr(),)+
                    row = in(reg) 64usize,
                    out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

add_rows!(
    add_rows_1,
    (x0),
    (s0),
    ["tileloadd tmm0, [{s0} + {row}*1]"],
    ["tileloadd tmm6, [{x0} + {row}*1]" "tdpbf16ps tmm0, tmm4, tmm6"],
    ["tilestored [{s0} + {row}*1], tmm0"]
);
add_rows!(
    add_rows_2,
    (x0 x1),
    (s0 s1),
    ["tileloadd tmm0, [{s0} + {row}*1]" "tileloadd tmm2, [{s1} + {row}*1]"],
    [
        "tileloadd tmm6, [{x0} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{x1} + {row}*1]"
        "tdpbf16ps tmm2, tmm4, tmm7"
    ],
    ["tilestored [{s0} + {row}*1], tmm0" "tilestored [{s1} + {row}*1], tmm2"]
);

/// Adds the products of a staged panel with two x tiles.
///
/// # Safety
/// The tiles are configured; the panel and the x tiles have `steps` (at least 1) steps.
pub(super) unsafe fn add_panel_2(
    panel: &Panel,
    x0: *const u32,
    x1: *const u32,
    steps: usize,
    sums0: &mut [f32; 2 * TILE],
    sums1: &mut [f32; 2 * TILE],
) {
    // SAFETY: reads the operands inside their bounds and updates the sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s0} + {row}*1]",
            "tileloadd tmm1, [{s0} + {row}*1 + 1024]",
            "tileloadd tmm2, [{s1} + {row}*1]",
            "tileloadd tmm3, [{s1} + {row}*1 + 1024]",
            "2:",
            "tileloadd tmm4, [{w} + {row}*1]",
            "tileloadd tmm6, [{x0} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "tileloadd tmm7, [{x1} + {row}*1]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {w}, 2048",
            "add {x0}, 1024",
            "add {x1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{s0} + {row}*1], tmm0",
            "tilestored [{s0} + {row}*1 + 1024], tmm1",
            "tilestored [{s1} + {row}*1], tmm2",
            "tilestored [{s1} + {row}*1 + 1024], tmm3",
            w = inout(reg) panel.0.as_ptr() => _,
            x0 = inout(reg) x0 => _,
            x1 = inout(reg) x1 => _,
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

/// Adds the products of a staged panel with one x tile.
///
/// # Safety
/// The tiles are configured; the panel and the x tile have `steps` (at least 1) steps.
pub(super) unsafe fn add_panel_1(panel: &Panel, x: *const u32, steps: usize, sums: &mut [f32; 2 * TILE]) {
    // SAFETY: reads the operands inside their bounds and updates the sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s} + {row}*1]",
            "tileloadd tmm1, [{s} + {row}*1 + 1024]",
            "2:",
            "tileloadd tmm6, [{x} + {row}*1]",
            "tileloadd tmm4, [{w} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {w}, 2048",
            "add {x}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{s} + {row}*1], tmm0",
            "tilestored [{s} + {row}*1 + 1024], tmm1",
            w = inout(reg) panel.0.as_ptr() => _,
            x = inout(reg) x => _,
            steps = inout(reg) steps => _,
            s = in(reg) sums.as_mut_ptr(),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}
