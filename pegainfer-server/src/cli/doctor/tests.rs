//! Coverage of the compared calls.

use super::*;
use models::groups;
use pegainfer_core::tensor::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Bundled models with CUDA kernels.
const BUNDLED: &[&str] = &[
    "qwen3-tiny",
    #[cfg(feature = "qwen35")]
    "qwen35-tiny",
    #[cfg(feature = "deepseek-v4")]
    "dsv4-tiny-fp4fp8",
];

/// Every op of a step has a comparison. The CPU agrees with itself.
#[test]
fn every_op_is_known() {
    let mut cpu = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let mut portable = Exec::cpu(Isa::Portable, Some(2)).unwrap();
    let mut report = DoctorReport::default();
    let dirs = BUNDLED.iter().map(|model| pegainfer_testing::model_dir().with_file_name(model));
    for (_, model) in dirs.flat_map(|dir| Model::load(&dir).unwrap()) {
        for (batch, tokens, context) in [(1, 1, 100), (3, 1, 20), (2, 3, 50)] {
            for record in model.records(batch, tokens, context).unwrap() {
                if report.seen.insert(key(&record, context)) {
                    report.op(&mut cpu, &mut portable, &record, &model.case(context)).unwrap();
                }
            }
        }
    }
    for record in group_calls(&[(3, 1, 20)]) {
        report.op(&mut cpu, &mut portable, &record, &Model::small_groups().case(20)).unwrap();
    }
    assert_eq!(report.failed, 0);
}

/// The same of a vision tower, and of what positions of images change.
#[cfg(feature = "qwen35")]
#[test]
fn every_op_of_a_vision_tower_is_known() {
    let [mut cpu, mut other] = [(); 2].map(|()| Exec::cpu(Isa::best(), Some(2)).unwrap());
    let (model, mut report, mut ops) = (models::small_tower(), DoctorReport::default(), BTreeSet::new());
    // An image of 144 tokens, and one of 64, whose 256 patches have separate kernels for GEMMs and biases.
    for tokens in [150, 70] {
        for record in model.records(1, tokens, tokens).unwrap() {
            ops.insert(record.op);
            if report.seen.insert(key(&record, tokens)) {
                report.op(&mut cpu, &mut other, &record, &model.case(tokens)).unwrap();
            }
        }
    }
    assert_eq!(report.failed, 0);
    let expected = ["unfold_patches", "linear_bias", "add_bias", "grid_attention", "copy_rows"];
    assert!(expected.iter().chain(&["gated_qk_norm_rope_write_kv"]).all(|op| ops.contains(op)), "{ops:?}");
}

/// Calls of these steps with group-quantised weights.
fn group_calls(steps: &[StepShape]) -> Vec<OpRecord> {
    let (model, mut seen, mut calls) = (Model::small_groups(), HashSet::new(), Vec::new());
    for &(batch, tokens, context) in steps {
        let records = model.records(batch, tokens, context).unwrap();
        calls.extend(
            records.into_iter().filter(|record| groups::format(record).is_some() && seen.insert(key(record, context))),
        );
    }
    calls
}

#[test]
fn every_packed_format_is_checked_with_each_of_its_kernels() {
    let mut kernels = BTreeMap::<_, BTreeSet<_>>::new();
    for record in group_calls(&STEPS) {
        let format = groups::format(&record).unwrap();
        kernels.entry((format.to_string(), record.op)).or_default().insert(record.kernel);
    }
    for format in groups::FORMATS {
        // Wide groups of four bits have kernels of their own.
        let expected = match format {
            "int4 g128 f16 zero" | "int4 g128 bf16" | "int4 g256 f16" => {
                BTreeSet::from(["skinny_int4_mma", "skinny_int4", "widened_fp8"])
            }
            _ => BTreeSet::from(["skinny_groups", "widened"]),
        };
        for op in ["linear", "linear_add_norm", "linear_swiglu"] {
            assert_eq!(kernels.get(&(format.to_owned(), op)), Some(&expected), "{format}, {op}");
        }
    }
}

/// GEMMs with weights widened to FP8 read a rounded input, or round one themselves: rows that are no multiple of four.
#[test]
fn prompts_in_fp8_are_checked_with_both_inputs() {
    let steps = [&STEPS, Model::small_groups().more_steps].concat();
    let calls = group_calls(&steps);
    let widened = calls.iter().filter(|record| record.kernel == "widened_fp8");
    let inputs: HashSet<_> = widened.map(|record| (record.reads[0].dtype, record.reads[0].shape[0])).collect();
    for input in [(DType::Bf16, 130), (DType::Bf16, 301), (DType::E4m3, 300), (DType::E4m3, 512)] {
        assert!(inputs.contains(&input), "{input:?}");
    }
}
