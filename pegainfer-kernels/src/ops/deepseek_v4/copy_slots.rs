//! Copies of a sequence's state from one slot to another.

use super::values::{activation, cpu};
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Bytes of the vectors that a GPU copies.
const VECTOR: usize = 16;

/// Locations of the rings of [`copy_slots`]. A GPU copies all of them in one launch and needs their addresses in its
/// memory.
#[derive(Debug)]
pub struct RingTable {
    /// On a GPU: address of each ring and number of vectors of a slot, in two words each, `[rings, 4]` u32.
    table: Option<Tensor>,
    /// The addresses.
    rings: Vec<u64>,
    /// Vectors of the longest slot.
    pub(crate) longest: usize,
}

impl RingTable {
    /// The table of `rings`, each `[slots, ring, width]` bf16 or f32, with slots of whole vectors of 16 bytes. They
    /// must not move.
    pub fn new(exec: &mut Exec, rings: &[&Tensor]) -> Result<Self, OpError> {
        if exec.device() != Device::Cuda || rings.is_empty() {
            return Ok(Self { table: None, rings: Vec::new(), longest: 0 });
        }
        let (check, message) = (Check("copy_slots"), "a slot must be whole vectors of 16 bytes");
        let (mut words, mut longest) = (Vec::new(), 0);
        for ring in rings {
            let bytes = ring.rows_cols().1 * ring.dtype().size();
            check.that(bytes.is_multiple_of(VECTOR) && ring.device().is_multiple_of(VECTOR as u64), message)?;
            let vectors = bytes / VECTOR;
            words.extend([ring.device(), vectors as u64].iter().flat_map(|x| [*x as u32, (*x >> 32) as u32]));
            longest = longest.max(vectors);
        }
        let no_memory = |error: std::io::Error| OpError { op: "copy_slots", message: error.to_string() };
        let mut table = exec.tensor("ring_table", &[rings.len(), 4], DType::U32).map_err(no_memory)?;
        exec.fill_rows(&mut table, &words)?;
        Ok(Self { table: Some(table), rings: rings.iter().map(|ring| ring.device()).collect(), longest })
    }

    /// The table on the device, if it belongs to these rings.
    pub(crate) fn of(&self, rings: &[&mut Tensor]) -> Option<&Tensor> {
        let same = rings.iter().map(|ring| ring.device()).eq(self.rings.iter().copied());
        self.table.as_ref().filter(|_| same)
    }
}

/// Makes slot `to` of each ring equal to its slot `from`. `rings`: each `[slots, ring, width]` bf16 or f32; `table`:
/// theirs.
pub fn copy_slots(
    exec: &mut Exec,
    table: &RingTable,
    rings: &mut [&mut Tensor],
    from: u32,
    to: u32,
) -> Result<(), OpError> {
    let check = Check("copy_slots");
    let (from, to) = (from as usize, to as usize);
    for ring in &*rings {
        activation(check, ring, ring.shape())?;
        let slots = ring.rows_cols().0;
        check.that(from < slots && to < slots, "a slot is out of range")?;
    }
    exec.record(|_| {
        let all: Vec<&Tensor> = rings.iter().map(|ring| &**ring).collect();
        let bytes: usize = all.iter().map(|ring| 2 * ring.rows_cols().1 * ring.dtype().size()).sum();
        OpRecord::new("copy_slots", "copy", &all, &all, 0).with_bytes(bytes as u64)
    });
    if exec.device() == Device::Cuda {
        return gpu::copy_slots(exec, table, rings, (from, to));
    }
    if cpu(check, exec)?.is_some() {
        for ring in rings {
            let size = ring.rows_cols().1;
            match ring.dtype() {
                DType::F32 => ring.host_mut::<f32>().copy_within(from * size..(from + 1) * size, to * size),
                _ => ring.host_mut::<bf16>().copy_within(from * size..(from + 1) * size, to * size),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;

    #[test]
    fn every_ring_gets_the_other_slot() {
        Host::each(|mut host| {
            let mut short = host.zeros("short", &[3, 2, 4], DType::F32);
            let mut long = host.zeros("long", &[3, 5, 8], DType::Bf16);
            short.host_mut::<f32>().iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
            long.host_mut::<bf16>().iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(i as f32));
            let table = RingTable::new(&mut host.exec, &[&short, &long]).unwrap();
            copy_slots(&mut host.exec, &table, &mut [&mut short, &mut long], 2, 0).unwrap();
            let (short_values, long_values) = (short.host::<f32>(), long.host::<bf16>());
            assert_eq!(short_values[..8], short_values[16..]);
            assert_eq!((short_values[0], short_values[8]), (16.0, 8.0));
            assert_eq!(long_values[..40], long_values[80..]);
            assert_eq!((long_values[0].to_f32(), long_values[40].to_f32()), (80.0, 40.0));
            let error = copy_slots(&mut host.exec, &table, &mut [&mut short], 3, 0).unwrap_err();
            assert!(error.message.contains("out of range"), "{error}");
        });
    }
}
