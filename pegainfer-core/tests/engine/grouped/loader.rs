//! Group-quantised weights on a device.

use super::{Files, V1, fixture};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, Offset, ScaleDType, StoredFormat, Values};
use pegainfer_core::weights::{Columns, GroupedTensors, Loader, RandomBytes, Source, SourceTensor, random_bytes};
use safetensors::Dtype;
use std::ops::Range;

/// All values of a matrix.
fn values(matrix: &GroupedTensors, k: usize) -> Vec<f32> {
    let (code_bytes, scale_bytes) = (matrix.format.code_bytes(k), matrix.format.scale_bytes(k));
    let rows = matrix.codes.host::<u8>().chunks_exact(code_bytes).zip(matrix.scales.host().chunks_exact(scale_bytes));
    let row = |(codes, scales)| {
        let mut out = vec![0.0; k];
        matrix.format.dequantize_row(codes, scales, k, &mut out);
        out
    };
    rows.flat_map(row).collect()
}

/// Two modules of these kinds, `x` and `y`.
fn two(name: &str, kinds: [&str; 2]) -> (Files, [Vec<f32>; 2]) {
    let [(mut stored, x), (other, y)] = kinds.map(fixture);
    stored
        .extend(other.into_iter().map(|(name, dtype, shape, bytes)| (name.replacen('x', "y", 1), dtype, shape, bytes)));
    (Files::new(name, &stored), [x, y])
}

#[test]
fn parts_of_modules_are_stacked_and_their_tensors_count_as_used() {
    let (files, [x, y]) = two("stack", ["awq-g32", "awq-g32"]);
    let source = Source::Checkpoint(files.open());
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let parts = [("x.weight", 5..30), ("y.weight", 0..64)].map(|(name, part)| SourceTensor {
        name: name.to_owned(),
        rows: 64,
        part,
    });
    let (mut bytes, columns) = (0, Columns { stored: 256, part: 64..192 });
    let load = |loader: &mut Loader<'_>| {
        let Some(StoredFormat::Grouped(format)) = loader.format("x.weight", V1)? else { panic!("not in groups") };
        let matrix = loader.grouped("xy", &parts, columns.clone(), (format, V1))?;
        assert!(loader.unused().is_empty(), "{:?}", loader.unused());
        let wide = loader.dequantized("xy", &parts, columns.clone(), V1)?;
        Ok((matrix, wide.host::<bf16>().to_vec()))
    };
    let (matrix, wide) = Loader::run(&mut exec, &source, &mut |n| bytes += n, load).unwrap();
    assert_eq!(bytes, matrix.codes.bytes() + matrix.scales.bytes() + 2 * 89 * 128);
    let rows = x.chunks_exact(256).skip(5).take(25).chain(y.chunks_exact(256));
    let expected: Vec<f32> = rows.flat_map(|row| &row[64..192]).copied().collect();
    assert_eq!(values(&matrix, 128), expected);
    assert!(wide.iter().copied().eq(expected.into_iter().map(bf16::from_f32)));
}

/// Ranks round their own rows and columns.
#[test]
fn a_part_is_rounded_to_the_bits_that_it_has_in_the_whole() {
    let value = |i: usize| bf16::from_f32((i * 37 % 1009) as f32 / 504.0 - 1.0);
    let bytes: Vec<u8> = (0..40 * 512).flat_map(|i| value(i).to_le_bytes()).collect();
    let files = Files::new("rounded", &[("x.weight".to_owned(), Dtype::BF16, vec![40, 512], bytes)]);
    let source = Source::Checkpoint(files.open());
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let format = GroupFormat::rounded_int4(512).unwrap();
    let mut rounded = |rows: Range<usize>, columns: Range<usize>| {
        let part = [SourceTensor { name: "x.weight".to_owned(), rows: 40, part: rows }];
        let width = columns.len();
        let columns = Columns { stored: 512, part: columns };
        let load = |loader: &mut Loader<'_>| loader.rounded_to_groups("x", &part, columns, format);
        values(&Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap(), width)
    };
    let whole = rounded(0..40, 0..512);
    for (rows, columns) in [(20..40, 0..512), (3..25, 128..384), (0..40, 256..512)] {
        let expected = whole.chunks_exact(512).take(rows.end).skip(rows.start).flat_map(|row| &row[columns.clone()]);
        assert!(rounded(rows.clone(), columns.clone()).iter().eq(expected), "{rows:?} {columns:?}");
    }
}

#[test]
fn a_stack_of_two_formats_is_refused() {
    let (files, _) = two("mixed", ["awq-g32", "awq-g128"]);
    let source = Source::Checkpoint(files.open());
    let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
    let parts = ["x.weight", "y.weight"].map(|name| SourceTensor::whole(name.to_owned(), 64));
    let format = GroupFormat::int(4, 32, ScaleDType::F16, Offset::Zero);
    let load = |loader: &mut Loader<'_>| loader.grouped("xy", &parts, 256, (format, V1));
    let error = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap_err().to_string();
    assert!(error.starts_with("y.weight is int4 g128 f16 zero, expected int4 g32 f16 zero"), "{error}");
    let load = |loader: &mut Loader<'_>| {
        loader.grouped("x", &[SourceTensor::whole("x.weight".to_owned(), 64)], 512, (format, V1))
    };
    let error = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap_err().to_string();
    assert!(error.contains("x.qweight is int4 g32 f16 zero [64, 256], but config.json asks for [64, 512]"), "{error}");
}

#[test]
fn dummy_weights_of_every_format_have_the_deviation_of_the_configuration() {
    let on_host: RandomBytes = |_, seed, mask, out| {
        random_bytes(out.host_mut(), seed, mask);
        Ok(())
    };
    let source = Source::Dummy { seed: 3, std: 0.02, uniform: |_, _, _, _| Ok(()), random_bytes: on_host };
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let k = 768;
    let int = |bits, offset| GroupFormat::int(bits, 128, ScaleDType::F16, offset);
    let block = |values, scales| GroupFormat { values, scales };
    for (format, tolerance) in [
        (int(4, Offset::None), 0.01),
        (int(4, Offset::Zero), 0.01),
        (int(4, Offset::Min), 0.01),
        (int(5, Offset::None), 0.01),
        (int(5, Offset::Min), 0.01),
        (int(8, Offset::None), 0.01),
        (GroupFormat::int(4, k, ScaleDType::Bf16, Offset::None), 0.01),
        (block(Values::Iq4, GroupScales::Xs), 0.01),
        (block(Values::Int { bits: 4 }, GroupScales::K4), 0.01),
        (block(Values::Int { bits: 5 }, GroupScales::K4), 0.01),
        (block(Values::Int { bits: 6 }, GroupScales::K6), 0.01),
        (GroupFormat::NVFP4, 0.01),
        // Powers of two.
        (GroupFormat::MXFP4, 0.42),
        (GroupFormat::fp8(k, ScaleDType::F32), 0.01),
    ] {
        let part = [SourceTensor::whole("x.weight".to_owned(), 300)];
        let load = |loader: &mut Loader<'_>| loader.grouped("x", &part, k, (format, V1));
        let matrix = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap();
        let values = values(&matrix, k);
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let std = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n).sqrt();
        assert!(mean.abs() < 0.12 * 0.02 && (std / 0.02 - 1.0).abs() < tolerance, "{format}: mean {mean}, std {std}");
    }
}
