//! Test: the ops of attention with gates are known here, and agree between the CPU's instruction sets.

use super::{Case, compare};
use crate::ops::{self, AttentionBatch, AttentionLoad, HeadShape, Heads, KvDType};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, Tensor};

const SHAPE: HeadShape = HeadShape { heads: 4, kv_heads: 2, head_dim: 256 };
const CONTEXT: usize = 40;

/// Records of a layer by an executor, with the fused op and with separate ops.
fn records() -> Vec<OpRecord> {
    let (rows, max_blocks, blocks, rotary_dim) = (3, 3, 9, 64);
    let exec = &mut Exec::meta().unwrap();
    let mut tensor = |name: &str, shape: &[usize], dtype: DType| -> Tensor { exec.tensor(name, shape, dtype).unwrap() };
    let projected = tensor("qkv", &[rows, SHAPE.gated_qkv_width()], DType::Bf16);
    let norms = ["q_norm", "k_norm"].map(|name| tensor(name, &[SHAPE.head_dim], DType::F32));
    let rope = tensor("rope", &[CONTEXT, rotary_dim], DType::F32);
    let at = ["positions", "slots"].map(|name| tensor(name, &[rows], DType::U32));
    let [mut q, mut out] = ["q", "attended"].map(|name| tensor(name, &[rows, SHAPE.q_width()], DType::Bf16));
    let [k_shape, v_shape] = SHAPE.cache(Device::Meta, KvDType::Bf16, blocks);
    let (mut k, mut v) = (tensor("kv.k", &k_shape, DType::Bf16), tensor("kv.v", &v_shape, DType::Bf16));
    let batch = AttentionBatch {
        qo_indptr: &tensor("qo_indptr", &[rows + 1], DType::U32),
        kv_lens: &tensor("kv_lens", &[rows], DType::U32),
        block_tables: &tensor("block_tables", &[rows, max_blocks], DType::U32),
        load: AttentionLoad::of([(1, CONTEXT); 3]),
    };
    let norms = (&norms[0], &norms[1]);
    let heads = Heads { shape: SHAPE, norms, eps: 1e-6, rope: &rope, positions: &at[0], slots: &at[1] };
    let cache = (&mut k, &mut v);
    let (result, records) = exec.recording(|exec| {
        let (k, v) = cache;
        ops::gated_qk_norm_rope_write_kv(exec, &projected, &heads, &mut q, (k, v))?;
        ops::attention(exec, &q, (k, v), &batch, SHAPE, 1.0 / 16.0, &mut out)?;
        ops::attention_gate(exec, &projected, SHAPE, &mut out)?;
        ops::gated_decode_attention(exec, &projected, &heads, &batch, (k, v), &mut q, &mut out)
    });
    result.unwrap();
    records
}

#[test]
fn instruction_sets_agree() {
    let case = Case { shape: SHAPE, context: CONTEXT, rope_theta: 1e7, exact_in_fp8: false };
    let records = records();
    assert_eq!(records.len(), 4);
    let cpu = |isa: Isa| Exec::cpu(isa, Some(2)).unwrap();
    for isa in Isa::available() {
        for record in &records {
            let found = compare(&mut cpu(Isa::available()[0]), &mut cpu(isa), record, &case).unwrap();
            assert!(found.is_some_and(|found| found.ok()), "{} on {}", record.op, isa.name());
        }
    }
}
