use super::argument::check_dtype;
use super::header::{Signature, entries, header};
use super::kernels::{KERNELS, STRUCTS};
use pegainfer_core::tensor::DType;
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

/// Texts of the files in csrc/ with their paths below it.
fn csrc() -> Vec<(PathBuf, String)> {
    let csrc: PathBuf = [env!("CARGO_MANIFEST_DIR"), "csrc"].iter().collect();
    let folders = fs::read_dir(&csrc).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    files.map(|path| (path.strip_prefix(&csrc).unwrap().to_owned(), fs::read_to_string(&path).unwrap())).collect()
}

#[test]
fn a_header_declares_all_kernels_of_its_source() {
    let text = header("rows_swiglu", &[STRUCTS, KERNELS]);
    let declaration =
        "extern \"C\" __global__ void swiglu(const bf16 *gate_up, void *out, uint32_t padded, uint32_t width);";
    assert_eq!(text.lines().skip(2).collect::<Vec<_>>(), [declaration]);
    let norms = header("rows_norm", &[STRUCTS, KERNELS]);
    let [bf16, f32] = ["bf16", "float"].map(|t| {
        format!("(const bf16 *x, const {t} *weight, void *out, uint32_t padded, uint32_t hidden, float eps);")
    });
    assert!(norms.contains(&format!(" rms_norm{bf16}")) && norms.contains(&format!(" rms_norm_f32{f32}")), "{norms}");
    let maps = header("gemm_wgmma_swiglu", &[STRUCTS, KERNELS]);
    assert!(maps.contains("(const __grid_constant__ TensorMap x, "), "{maps}");
}

#[test]
fn a_packed_kernel_takes_a_struct_of_eight_bytes_a_member() {
    let text = header("layers_decode", &[STRUCTS, KERNELS]);
    let at = |needle: &str| text.find(needle).unwrap_or_else(|| panic!("{needle} in {text}"));
    assert!(at("struct Layer {") < at("struct Step {"));
    assert!(at("    alignas(8) const Layer *layers;") < at("    alignas(8) float scale;"));
    assert!(at("static_assert(sizeof(Step) == 8 * 24") < at("decode_layers_1_3072(const __grid_constant__ Step"));
}

#[test]
fn names_are_unique() {
    let entries: Vec<_> = KERNELS.iter().flat_map(|s| s.entries).map(|(name, _)| *name).collect();
    assert_eq!(entries.iter().collect::<HashSet<_>>().len(), entries.len());
    for Signature { parameters, entries, .. } in KERNELS.iter().chain(STRUCTS) {
        let names: HashSet<_> = parameters.iter().map(|parameter| parameter.name).collect();
        assert_eq!(names.len(), parameters.len(), "{entries:?}");
    }
}

#[test]
fn tensor_maps_come_first_and_elements_are_known() {
    for Signature { parameters, entries, .. } in KERNELS {
        let others = parameters.iter().skip_while(|parameter| parameter.kind == "Map");
        assert!(others.clone().all(|parameter| parameter.kind != "Map"), "{entries:?}");
        let generic = parameters.iter().any(|parameter| parameter.element == "T");
        assert!(entries.iter().all(|(_, t)| t.is_empty() != generic), "{entries:?}");
    }
}

#[test]
fn every_source_includes_its_header() {
    let files = csrc();
    let mut sources = HashSet::new();
    for (path, text) in files.iter().filter(|(path, _)| path.extension().is_some_and(|extension| extension == "cu")) {
        let name = path.with_extension("").to_str().unwrap().replace('/', "_");
        assert!(!entries(&name, KERNELS).is_empty(), "{} is not listed", path.display());
        let include = format!("#include \"abi/{name}.h\"");
        // A header that uses the kernel's struct includes it instead.
        let header = |(other, text): &(PathBuf, String)| other.parent() == path.parent() && text.contains(&include);
        assert!(text.contains(&include) || files.iter().any(header), "{}", path.display());
        sources.insert(name);
    }
    let unknown = KERNELS.iter().map(Signature::image_name).find(|source| !sources.contains(source));
    assert_eq!(unknown, None);
}

#[test]
fn a_tensor_of_another_dtype_is_an_error() {
    assert!(
        check_dtype("weight", "Bf16", DType::Bf16).is_ok() && check_dtype("parts", "IntraChunk", DType::U8).is_ok()
    );
    assert!(check_dtype("layers", "Layer", DType::U32).is_ok());
    let error = check_dtype("weight", "F32", DType::Bf16).unwrap_err();
    assert_eq!(error.message, "weight is bf16, expected f32");
}
