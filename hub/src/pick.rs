//! Which of a repository's files are wanted: a model by its quantisation, the projector and the drafter beside it.
//!
//! All of it is read off the files' names, as people and other programs do:
//!
//! ```text
//! gemma-4-E4B-it-Q8_0.gguf                            Q8_0
//! UD-Q4_K_XL/model-UD-Q4_K_XL-00001-of-00002.gguf     UD-Q4_K_XL, in two parts
//! mmproj-BF16.gguf                                    a projector
//! mtp-gemma-4-E4B-it-Q8_0.gguf                        a drafter
//! ```
//!
//! A repository without such files may be a checkpoint: `config.json`, tokenizer and safetensors are one model together,
//! which its first file stands for.

use std::collections::BTreeMap;

use crate::error::HubError;
use crate::listing::{RemoteFile, Repository};

/// One of the models of a repository, or a file that goes with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant<'a> {
    /// The quantisation, as the name has it.
    pub tag: String,
    /// Its parts in their order, the first first.
    pub files: Vec<&'a RemoteFile>,
}

/// What is asked for.
pub struct Wanted<'a> {
    /// A quantisation, or a file's name; `None`: the best that fits.
    pub tag: Option<&'a str>,
    /// Bytes that weights may take where nothing is asked for, and the same for people.
    pub room: (u64, &'a str),
    /// Whether a format can be read: a tag without the letters for its mixture, such as `Q4_K`.
    pub is_readable: &'a dyn Fn(&str) -> bool,
    pub projector: bool,
    pub drafter: bool,
}

/// What is to be fetched, and why that.
pub struct Selection<'a> {
    pub model: Variant<'a>,
    pub projector: Option<Variant<'a>>,
    pub drafter: Option<Variant<'a>>,
    /// A sentence without its full stop.
    pub why: String,
}

impl Selection<'_> {
    /// All files, the model's first.
    pub fn files(&self) -> Vec<&RemoteFile> {
        let variants = [Some(&self.model), self.projector.as_ref(), self.drafter.as_ref()];
        variants.into_iter().flatten().flat_map(|variant| variant.files.iter().copied()).collect()
    }
}

impl Variant<'_> {
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Bits of a weight, roughly.
    fn bits(&self) -> u32 {
        bits(&self.tag).unwrap_or(16)
    }

    /// What most of its weights are.
    fn format(&self) -> String {
        let tag = self.tag.to_ascii_uppercase();
        let tag = tag.strip_prefix("UD-").unwrap_or(&tag);
        let mixture = ["_XL", "_L", "_M", "_S"].iter().find_map(|ending| tag.strip_suffix(ending));
        mixture.unwrap_or(tag).to_owned()
    }
}

/// Chooses from a repository.
pub fn select<'a>(repository: &'a Repository, wanted: &Wanted<'_>) -> Result<Selection<'a>, HubError> {
    let (mut models, mut projectors, mut drafters) = (Vec::new(), Vec::new(), Vec::new());
    for variant in variants(repository) {
        match kind(&variant.files[0].name) {
            Kind::Model => models.push(variant),
            Kind::Projector => projectors.push(variant),
            Kind::Drafter => drafters.push(variant),
            Kind::Other => {}
        }
    }
    if models.is_empty() || wanted.tag == Some(CHECKPOINT) {
        models.extend(checkpoint(repository));
    }
    if models.is_empty() {
        return Err(HubError::NoModel { repository: repository.name.clone() });
    }
    // A drafter's repository has nothing else.
    let beside = |list: Vec<Variant<'a>>, is_wanted: bool, bits: u32| {
        list.into_iter().filter(|_| is_wanted).min_by_key(|variant| variant.bits().abs_diff(bits))
    };
    let (model, why) = match wanted.tag {
        Some(tag) => {
            let model = by_tag(repository, &models, tag)?;
            if !is_readable(&model, wanted) {
                let why = format!("weights in {} cannot be read yet", model.tag);
                return Err(HubError::NoneFits { repository: repository.name.clone(), why });
            }
            (model, "as asked for".to_owned())
        }
        None => {
            // What comes along needs room too.
            let smallest = |list: &[Variant<'_>], is_wanted: bool| {
                list.iter().filter(|_| is_wanted).map(Variant::bytes).min().unwrap_or(0)
            };
            let beside = smallest(&projectors, wanted.projector) + smallest(&drafters, wanted.drafter);
            best(repository, &models, wanted, beside)?
        }
    };
    let bits = model.bits();
    let projector = beside(projectors, wanted.projector, bits);
    let drafter = beside(drafters, wanted.drafter, bits);
    Ok(Selection { model, projector, drafter, why })
}

/// A name that says nothing of its weights is given a chance.
fn is_readable(model: &Variant<'_>, wanted: &Wanted<'_>) -> bool {
    bits(&model.tag).is_none() || (wanted.is_readable)(&model.format())
}

/// The one with a tag: exactly, or with another's prefix before it; or the file of that name.
fn by_tag<'a>(repository: &Repository, models: &[Variant<'a>], tag: &str) -> Result<Variant<'a>, HubError> {
    let is_same = |variant: &&Variant<'_>| variant.tag.eq_ignore_ascii_case(tag);
    let is_file = |variant: &&Variant<'_>| {
        let name = variant.files[0].name.as_str();
        name == tag || name.rsplit('/').next() == Some(tag)
    };
    let dynamic = format!("UD-{tag}");
    let is_dynamic = |variant: &&Variant<'_>| variant.tag.eq_ignore_ascii_case(&dynamic);
    let found = models.iter().find(is_same).or_else(|| models.iter().find(is_file));
    let no_tag =
        || HubError::NoTag { repository: repository.name.clone(), tag: tag.into(), known: tags(models.iter()) };
    found.or_else(|| models.iter().find(is_dynamic)).cloned().ok_or_else(no_tag)
}

/// The largest of at most 8 bits that fits: more bits are hardly better and take twice the time. Of those with more,
/// the smallest, where there is nothing else.
fn best<'a>(
    repository: &Repository,
    models: &[Variant<'a>],
    wanted: &Wanted<'_>,
    beside: u64,
) -> Result<(Variant<'a>, String), HubError> {
    let none = |why: String| HubError::NoneFits { repository: repository.name.clone(), why };
    let readable: Vec<&Variant<'_>> = models.iter().filter(|model| is_readable(model, wanted)).collect();
    let Some(smallest) = readable.iter().copied().min_by_key(|model| model.bytes()) else {
        return Err(none(format!("none of its quantisations can be read: {}", tags(models.iter()))));
    };
    let (room, place) = wanted.room;
    let fits = |model: &&&Variant<'a>| model.bytes() + beside <= room;
    let is_low = |model: &&&Variant<'a>| model.bits() <= 8;
    let low = readable.iter().filter(is_low).filter(fits).max_by_key(|model| model.bytes());
    if let Some(model) = low {
        let why = match models.len() {
            1 => "the only one there is".to_owned(),
            _ => format!("of {} the largest of at most 8 bits whose weights fit into {place}", tags(models.iter())),
        };
        return Ok(((*model).clone(), why));
    }
    let high = readable.iter().filter(|model| !is_low(model)).filter(fits).min_by_key(|model| model.bytes());
    if let Some(model) = high {
        let why = match models.len() {
            1 => "the only one there is".to_owned(),
            _ => format!("of {} the smallest that can be read", tags(models.iter())),
        };
        return Ok(((*model).clone(), why));
    }
    let (tag, needed) = (&smallest.tag, bytes(smallest.bytes() + beside));
    Err(none(format!(
        "the smallest that can be read, {tag}, has {needed}, and weights should fit into {place}; to use it all the same, \
         name it: {}:{tag}",
        repository.name
    )))
}

/// `8.03 GB`, in millions or in thousands of them.
fn bytes(count: u64) -> String {
    match count {
        0..1_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}

fn tags<'v, 'a: 'v>(models: impl Iterator<Item = &'v Variant<'a>>) -> String {
    let tags: Vec<&str> = models.map(|model| model.tag.as_str()).collect();
    tags.join(", ")
}

/// All GGUF files, parts of one put together, by their names.
fn variants(repository: &Repository) -> Vec<Variant<'_>> {
    // By stem and number of parts.
    let mut whole: BTreeMap<(&str, u32), Vec<(u32, &RemoteFile)>> = BTreeMap::new();
    for file in &repository.files {
        let Some(stem) = file.name.strip_suffix(".gguf") else { continue };
        let (stem, part, parts) = part(stem).unwrap_or((stem, 1, 1));
        whole.entry((stem, parts)).or_default().push((part, file));
    }
    let mut found = Vec::new();
    for ((stem, parts), mut files) in whole {
        files.sort_by_key(|(part, _)| *part);
        // One that lacks a part is of no use.
        if files.iter().map(|(part, _)| *part).eq(1..=parts) {
            let tag = tag(stem).unwrap_or_else(|| base(stem).to_owned());
            found.push(Variant { tag, files: files.into_iter().map(|(_, file)| file).collect() });
        }
    }
    found
}

/// What the model of safetensors in a repository is called.
const CHECKPOINT: &str = "safetensors";

/// The files of a checkpoint, `config.json` first; `None` where there is none.
fn checkpoint(repository: &Repository) -> Option<Variant<'_>> {
    const BESIDE: [&str; 7] = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "hf_quant_config.json",
        "model.safetensors.index.json",
    ];
    let named = |name: &&str| repository.files.iter().find(|file| file.name == **name);
    let mut files: Vec<&RemoteFile> = BESIDE.iter().filter_map(named).collect();
    let is_weights = |file: &&RemoteFile| {
        file.name.ends_with(".safetensors") && !file.name.contains('/') && !file.name.starts_with("consolidated")
    };
    let weights: Vec<&RemoteFile> = repository.files.iter().filter(is_weights).collect();
    if weights.is_empty() || files.first().is_none_or(|file| file.name != "config.json") {
        return None;
    }
    files.extend(weights);
    Some(Variant { tag: CHECKPOINT.into(), files })
}

/// `STEM-00001-of-00003`.
fn part(stem: &str) -> Option<(&str, u32, u32)> {
    let (rest, parts) = stem.rsplit_once("-of-")?;
    let (rest, part) = rest.rsplit_once('-')?;
    let number = |text: &str| text.parse().ok().filter(|_| text.len() == 5);
    Some((rest, number(part)?, number(parts)?))
}

enum Kind {
    Model,
    Projector,
    Drafter,
    /// What quantisers leave, and drafters of other kinds.
    Other,
}

fn kind(name: &str) -> Kind {
    let name = base(name).to_ascii_lowercase();
    if name.contains("mmproj") {
        Kind::Projector
    } else if name.starts_with("mtp-") {
        Kind::Drafter
    } else if ["imatrix", "eagle3-", "dflash-", "dspark-"].iter().any(|other| name.starts_with(other)) {
        Kind::Other
    } else {
        Kind::Model
    }
}

fn base(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// The quantisation that a name has, of its last word that is one; else of its folders.
fn tag(stem: &str) -> Option<String> {
    let in_part = |part: &str| {
        let words: Vec<&str> = part.split(['-', '.']).collect();
        let at = words.iter().rposition(|word| bits(word).is_some())?;
        let is_dynamic = at > 0 && words[at - 1].eq_ignore_ascii_case("ud");
        Some(if is_dynamic { format!("UD-{}", words[at]) } else { words[at].to_owned() })
    };
    stem.rsplit('/').find_map(in_part)
}

/// Bits of a weight of a quantisation; `None` for a word that is none.
fn bits(tag: &str) -> Option<u32> {
    let tag = tag.to_ascii_uppercase();
    let tag = tag.strip_prefix("UD-").unwrap_or(&tag);
    match tag {
        "F32" => return Some(32),
        "F16" | "BF16" | "FP16" => return Some(16),
        _ => {}
    }
    let number = ["IQ", "TQ", "Q", "MXFP", "NVFP"].iter().find_map(|kind| tag.strip_prefix(kind))?;
    let (digits, rest) = number.split_at(number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len()));
    let is_rest = rest.is_empty() || rest.starts_with('_');
    digits.parse().ok().filter(|bits| is_rest && (1..=8).contains(bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(files: &[(&str, u64)]) -> Repository {
        let file = |(name, gigabytes): &(&str, u64)| RemoteFile {
            name: name.to_string(),
            bytes: gigabytes * 1_000_000_000,
            etag: "e".repeat(64),
        };
        Repository { name: "a/b".into(), commit: "c".repeat(40), files: files.iter().map(file).collect() }
    }

    /// What is chosen: the first file of each kind, and why.
    fn chosen(files: &[(&str, u64)], tag: Option<&str>, room: u64) -> Result<(Vec<String>, String), String> {
        let is_readable = |format: &str| ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "F16"].contains(&format);
        let wanted = Wanted {
            tag,
            room: (room * 1_000_000_000, "the GPU"),
            is_readable: &is_readable,
            projector: true,
            drafter: true,
        };
        let repository = repository(files);
        let selection = select(&repository, &wanted).map_err(|error| error.to_string())?;
        Ok((selection.files().iter().map(|file| file.name.clone()).collect(), selection.why))
    }

    const E4B: [(&str, u64); 9] = [
        ("README.md", 0),
        ("imatrix_unsloth.gguf", 0),
        ("gemma-4-E4B-it-BF16.gguf", 15),
        ("gemma-4-E4B-it-Q8_0.gguf", 8),
        ("gemma-4-E4B-it-UD-Q4_K_XL.gguf", 5),
        ("gemma-4-E4B-it-UD-IQ2_M.gguf", 3),
        ("mmproj-BF16.gguf", 1),
        ("mmproj-F32.gguf", 2),
        ("MTP/mtp-gemma-4-E4B-it-Q8_0.gguf", 1),
    ];

    #[test]
    fn a_repository_of_safetensors_is_one_model() {
        let files = [
            ("README.md", 0),
            ("config.json", 0),
            ("model-00001-of-00002.safetensors", 5),
            ("model-00002-of-00002.safetensors", 3),
            ("model.safetensors.index.json", 0),
            ("tokenizer.json", 0),
        ];
        let is_readable = |_: &str| true;
        let wanted =
            |tag| Wanted { tag, room: (9 << 30, "the GPU"), is_readable: &is_readable, projector: true, drafter: true };
        let names = |repository: &Repository, tag| -> Vec<String> {
            let chosen = select(repository, &wanted(tag)).expect("a choice").model;
            chosen.files.iter().map(|file| file.name.clone()).collect()
        };
        let alone = repository(&files);
        let all = names(&alone, None);
        assert_eq!((all.len(), all[0].as_str(), all[4].as_str()), (5, "config.json", files[3].0));
        assert_eq!(names(&alone, Some("safetensors")), all);
        let with_gguf = repository(&[&files[..], &[("m-Q8_0.gguf", 4)]].concat());
        assert_eq!(names(&with_gguf, None), ["m-Q8_0.gguf"]);
        assert_eq!(names(&with_gguf, Some("safetensors")), all);
        assert!(select(&repository(&files[2..]), &wanted(None)).is_err(), "no config");
    }

    #[test]
    fn the_best_that_fits_is_taken_with_what_goes_with_it() {
        let (files, why) = chosen(&E4B, None, 24).expect("a choice");
        assert_eq!(files, ["gemma-4-E4B-it-Q8_0.gguf", "mmproj-BF16.gguf", "MTP/mtp-gemma-4-E4B-it-Q8_0.gguf"]);
        assert_eq!(
            why,
            "of BF16, Q8_0, UD-IQ2_M, UD-Q4_K_XL the largest of at most 8 bits whose weights fit into the GPU"
        );
        // 8 + 1 + 1 do not fit into 9.
        assert_eq!(chosen(&E4B, None, 9).expect("a choice").0[0], "gemma-4-E4B-it-UD-Q4_K_XL.gguf");
        let error = chosen(&E4B, None, 6).expect_err("too little");
        assert_eq!(
            error,
            "a/b: the smallest that can be read, UD-Q4_K_XL, has 7.00 GB, and weights should fit into the GPU; to use it all \
             the same, name it: a/b:UD-Q4_K_XL"
        );
        let only = chosen(&[("m-BF16.gguf", 15)], None, 24).expect("a choice");
        assert_eq!(only, (vec!["m-BF16.gguf".into()], "the only one there is".into()));
        let error = chosen(&[("m-IQ2_XXS.gguf", 1), ("m-Q2_K.gguf", 1)], None, 24).expect_err("none is readable");
        assert_eq!(error, "a/b: none of its quantisations can be read: IQ2_XXS, Q2_K");
    }

    #[test]
    fn tags_are_found_in_any_case_and_by_files() {
        let first = |tag: &str| chosen(&E4B, Some(tag), 1).map(|(files, _)| files[0].clone());
        assert_eq!(first("bf16").as_deref(), Ok("gemma-4-E4B-it-BF16.gguf"));
        assert_eq!(first("Q4_K_XL").as_deref(), Ok("gemma-4-E4B-it-UD-Q4_K_XL.gguf"));
        assert_eq!(first("gemma-4-E4B-it-Q8_0.gguf").as_deref(), Ok("gemma-4-E4B-it-Q8_0.gguf"));
        assert_eq!(first("IQ2_M").expect_err("unreadable"), "a/b: weights in UD-IQ2_M cannot be read yet");
        let error = first("Q5_K_M").expect_err("there is none");
        assert_eq!(error, "a/b has no Q5_K_M: it has BF16, Q8_0, UD-IQ2_M, UD-Q4_K_XL");
    }

    #[test]
    fn parts_belong_together_and_must_all_be_there() {
        let parts =
            [("Q4_0/m-00002-of-00002.gguf", 2), ("Q4_0/m-00001-of-00002.gguf", 2), ("Q8_0/m-00001-of-00002.gguf", 4)];
        let (files, why) = chosen(&parts, None, 24).expect("a choice");
        assert_eq!(files, ["Q4_0/m-00001-of-00002.gguf", "Q4_0/m-00002-of-00002.gguf"]);
        assert_eq!(why, "the only one there is");
        let error = chosen(&[("README.md", 0), ("mmproj-F16.gguf", 1)], None, 24).expect_err("no model");
        assert_eq!(error, "a/b has no GGUF model: look for one whose name ends in GGUF, such as a/b-GGUF");
    }

    #[test]
    fn tags_are_words_of_names() {
        for (stem, expected) in [
            ("gemma-4-26B-A4B-it-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("gemma-4-12B-it.i1-Q4_K_M", Some("Q4_K_M")),
            ("gemma-4-12B-it.Q8_0", Some("Q8_0")),
            ("gemma-4-E4B-it-q4_0-qat", Some("q4_0")),
            ("BF16/gemma-4-31B-it", Some("BF16")),
            ("gemma-4-31B-it-MXFP4_MOE", Some("MXFP4_MOE")),
            ("gemma-4-31B-it", None),
            ("Qwen3-Q", None),
        ] {
            assert_eq!(tag(stem).as_deref(), expected, "{stem}");
        }
    }
}
