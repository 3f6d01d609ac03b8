//! Tensors that do not fit each other, and values that no weight has: one sentence that names the tensor.

use super::{Files, Stored, V1, V1_SYMMETRIC, ZeroPoints, fixture, read};
use half::{bf16, f16};
use pegainfer_core::weights::grouped::GroupedWeight;
use safetensors::tensor::Dtype;

/// The refusal of a kind whose tensor `name` was changed: when it is opened, or when all of it is read.
fn refusal(kind: &str, name: &str, zeros: ZeroPoints, change: impl Fn(&mut Stored)) -> String {
    let (mut stored, _) = fixture(kind);
    let name = format!("x.{name}");
    change(stored.iter_mut().find(|tensor| tensor.0 == name).unwrap());
    let files = Files::new(&format!("bad-{kind}"), &stored);
    let checkpoint = files.open();
    let opened = GroupedWeight::open(&checkpoint, "x.weight", zeros);
    let error = match opened {
        Ok(weight) => {
            let weight = weight.unwrap();
            let refused = weight.check_shape(64, 256).err();
            refused.or_else(|| read(&weight, (0, 64), (0, 256)).err()).unwrap_or_else(|| panic!("{kind} {name}"))
        }
        Err(error) => error,
    };
    let text = error.to_string();
    assert!(text.contains("x.") && !text.contains('\n'), "{text}");
    text
}

/// Writes `value` as the last element.
fn last<const N: usize>(value: [u8; N]) -> impl Fn(&mut Stored) {
    move |tensor| {
        let at = tensor.3.len() - N;
        tensor.3[at..].copy_from_slice(&value);
    }
}

/// Gives the tensor another shape, and as many bytes of it.
fn shaped(shape: &[usize]) -> impl Fn(&mut Stored) {
    let shape = shape.to_vec();
    move |tensor| {
        let element = tensor.3.len() / tensor.2.iter().product::<usize>();
        tensor.3.resize(shape.iter().product::<usize>() * element, 0);
        tensor.2.clone_from(&shape);
    }
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    let infinite = f16::INFINITY.to_le_bytes();
    for kind in ["awq-g128", "gptq-g128-asym"] {
        let error = refusal(kind, "scales", V1, last(infinite));
        assert!(error.starts_with("x.scales has scales that are NaN or infinite"), "{error}");
    }
    for kind in ["w4a16-g32", "fp8-channel"] {
        let error = refusal(kind, "weight_scale", V1, last(bf16::NAN.to_le_bytes()));
        assert!(error.starts_with("x.weight_scale has scales that are NaN or infinite"), "{error}");
    }
    assert!(refusal("nvfp4", "weight_scale", V1, last([0x7f])).starts_with("x.weight_scale has NaN"));
    assert!(refusal("mxfp4", "weight_scale", V1, last([255])).starts_with("x.weight_scale has a scale of 255"));
    assert!(refusal("fp8-tensor", "weight", V1, last([0xff])).starts_with("x.weight has NaN"));
    for value in [0.0, -1.0, f32::NAN] {
        let error = refusal("nvfp4", "weight_global_scale", V1, last(value.to_le_bytes()));
        assert!(error.contains("expected one positive number"), "{error}");
        let error = refusal("nvfp4-modelopt", "weight_scale_2", V1, last(value.to_le_bytes()));
        assert!(error.starts_with("x.weight_scale_2 is"), "{error}");
    }
}

#[test]
fn zero_points_and_groups_that_contradict_the_configuration_are_refused() {
    let error = refusal("gptq-g128-sym", "qzeros", V1_SYMMETRIC, last([0x77, 0x77, 0x77, 0x76]));
    assert!(error.starts_with("x.qzeros has a zero point of 7") && error.contains("symmetric"), "{error}");
    let other = ZeroPoints { less_one: false, symmetric: true };
    assert!(refusal("gptq-g128-sym", "qzeros", other, |_| {}).contains("zero point of 7"), "version 2");
    let error = refusal("gptq-g128-asym", "g_idx", V1, last(2i32.to_le_bytes()));
    assert!(error.starts_with("x.g_idx names group 2, but there are 2"), "{error}");
    let error = refusal("gptq-g128-asym", "g_idx", V1, last((-1i32).to_le_bytes()));
    assert!(error.contains("names group -1"), "{error}");
    let error = refusal("gptq-g128-asym", "g_idx", V1, last(0i32.to_le_bytes()));
    assert!(error.contains("puts 129 columns into group 0, expected 128"), "{error}");
}

#[test]
fn shapes_that_do_not_fit_each_other_are_refused() {
    for (kind, name, shape, message) in [
        ("awq-g128", "scales", &[3, 64][..], "no whole number of groups"),
        ("awq-g128", "qweight", &[256, 16], "x.qweight is I32 [256, 16]"),
        ("awq-g128", "qzeros", &[2, 16], "x.qzeros is I32 [2, 16]"),
        // Twice as many columns of 4 bits: codes of 8 bits.
        ("gptq-g128-sym", "qweight", &[64, 64], "x.g_idx is I32 [256], but config.json asks for I32 [512]"),
        ("gptq-g128-sym", "g_idx", &[128], "x.g_idx is I32 [128]"),
        ("w4a16-g128", "weight_scale", &[64, 3], "x.weight_scale has 3 scales for rows of 256 columns"),
        ("w4a16-g128", "weight_scale", &[32, 2], "x.weight_scale is BF16 [32, 2]"),
        ("w4a16-g128", "weight_packed", &[64, 64], "x.weight_shape is [64, 256], but weight_packed holds [64, 512]"),
        ("w4a16-g128-asym", "weight_zero_point", &[64, 2], "x.weight_zero_point is I32 [64, 2]"),
        ("nvfp4", "weight_scale", &[64, 8], "x.weight_scale is F8_E4M3 [64, 8]"),
        ("nvfp4-modelopt", "weight", &[64, 64], "x.weight_scale is F8_E4M3 [64, 16]"),
        ("mxfp4", "weight_packed", &[32, 128], "x.weight_scale is U8 [64, 8]"),
        ("fp8-channel", "weight_scale", &[63, 1], "x.weight_scale is [63, 1] for a weight [64, 256]"),
    ] {
        let error = refusal(kind, name, V1, shaped(shape));
        assert!(error.contains(message), "{kind} {name}: {error}");
    }
    let wide = |tensor: &mut Stored| tensor.1 = Dtype::U16;
    assert!(refusal("w4a16-g128", "weight_scale", V1, wide).contains("x.weight_scale is U16; scales are served"));
}

#[test]
fn columns_can_only_be_shared_between_groups() {
    let (stored, _) = fixture("w4a16-g128");
    let files = Files::new("cut", &stored);
    let checkpoint = files.open();
    let weight = GroupedWeight::open(&checkpoint, "x.weight", V1).unwrap().unwrap();
    let error = read(&weight, (0, 64), (0, 64)).unwrap_err().to_string();
    assert!(error.starts_with("x.weight_packed has 256 columns") && error.contains("multiples of 128"), "{error}");
    assert!(error.contains("use fewer ranks"), "{error}");
}
