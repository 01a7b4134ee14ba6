//! Models split into `NAME-00001-of-0000N.gguf` files.

use std::path::{Path, PathBuf};

use super::file::Part;
use super::{Gguf, GgufError, Metadata, Source};

/// Far above any real model; each part is an open file.
const MAX_PARTS: u64 = 512;

/// What a file says about the model it is a part of.
struct Place {
    /// From 0.
    number: u64,
    count: u64,
}

impl Place {
    /// `None` for a file that is a whole model.
    fn of(metadata: &Metadata) -> Result<Option<Self>, GgufError> {
        let count = metadata.u64("split.count")?.unwrap_or(0);
        let number = metadata.u64("split.no")?.unwrap_or(0);
        Ok((count > 1).then_some(Self { number, count }))
    }
}

/// Makes a model of its first file, opening the others beside it.
pub(super) fn join(first: Part, path: &Path) -> Result<Gguf, GgufError> {
    let Some(place) = Place::of(&first.metadata)? else { return Gguf::from_parts(vec![first]) };
    if place.number != 0 {
        let first = part_path(path, place.number, 0, place.count)
            .map_or(String::new(), |path| format!(": {}", path.display()));
        return Err(GgufError::NotFirstPart {
            number: place.number.saturating_add(1),
            count: place.count,
            first,
        });
    }
    if place.count > MAX_PARTS {
        let (what, count, most) = ("parts of a split model", place.count, MAX_PARTS);
        return Err(GgufError::ImpossibleCount { what, count, most });
    }
    let announced = first.metadata.u64("split.tensors.count")?;
    let mut parts = vec![first];
    for number in 1..place.count {
        let Some(path) = part_path(path, 0, number, place.count) else {
            let what = format!(
                "the file is part 1 of {count}, so its name should end in -00001-of-{count:05}.gguf",
                count = place.count
            );
            return Err(GgufError::BadSplit { what });
        };
        let part = open_part(&path, number, place.count)
            .map_err(|source| GgufError::Part { path, source: Box::new(source) })?;
        parts.push(part);
    }
    let found: usize = parts.iter().map(|part| part.tensors.len()).sum();
    if announced.is_some_and(|announced| announced != found as u64) {
        let what = format!(
            "the first one announces {} tensors, all together hold {found}",
            announced.unwrap_or_default()
        );
        return Err(GgufError::BadSplit { what });
    }
    Gguf::from_parts(parts)
}

/// Refuses a part of a split model where no files can be beside it.
pub(super) fn refuse_parts(part: &Part) -> Result<(), GgufError> {
    match Place::of(&part.metadata)? {
        None => Ok(()),
        Some(Place { number, count }) => Err(GgufError::BadSplit {
            what: format!("part {} of {count} came without the others", number.saturating_add(1)),
        }),
    }
}

fn open_part(path: &Path, number: u64, count: u64) -> Result<Part, GgufError> {
    let part = Part::read(Source::open(path)?, number as u32)?;
    match Place::of(&part.metadata)? {
        Some(place) if place.number == number && place.count == count => Ok(part),
        place => {
            let (n, c) = place.map_or((0, 1), |place| (place.number, place.count));
            let what = format!(
                "it says it is part {} of {c}, not {} of {count}",
                n.saturating_add(1),
                number + 1
            );
            Err(GgufError::BadSplit { what })
        }
    }
}

/// The path of part `to`, given that of part `from`, both from 0.
fn part_path(path: &Path, from: u64, to: u64, count: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let suffix = |number: u64| format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1));
    let stem = name.strip_suffix(&suffix(from))?;
    Some(path.with_file_name(format!("{stem}{}", suffix(to))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let path = Path::new("/m/big-00001-of-00003.gguf");
        let third = Path::new("/m/big-00003-of-00003.gguf");
        assert_eq!(part_path(path, 0, 2, 3).as_deref(), Some(third));
        assert_eq!(part_path(third, 2, 0, 3).as_deref(), Some(path));
        assert_eq!(part_path(Path::new("/m/big.gguf"), 0, 2, 3), None);
    }
}
