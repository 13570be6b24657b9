//! Which layers each stage has, in all of Megatron-LM's notations.

use megatron::config::{Origins, PartitionMethod};

use super::flags::LayoutFlags;
use crate::error::{Error, Result};

/// A larger number of stages or layers counts as a mistake.
const MOST: usize = 1 << 20;

/// How layers are split among stages.
#[derive(Debug)]
pub enum Split {
    /// The method of `pipeline_partition`.
    Method(PartitionMethod),
    /// Given numbers on the first and last stage; the remaining stages share the rest evenly.
    Ends { first: Option<usize>, last: Option<usize> },
    /// Evenly, counting the embedding and/or the head with the loss as a layer each.
    Counted { embedding: bool, loss: bool },
    /// The number of layers of each virtual stage, in the order of the model.
    Layout(String, Vec<usize>),
}

impl Split {
    /// The split that `p` asks for.
    ///
    /// # Errors
    /// If `p` gives several splits, or a layout that cannot be parsed.
    pub fn of(p: &LayoutFlags, origins: &Origins) -> Result<Self> {
        let mut given = Vec::new();
        let (first, last) =
            (p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers);
        let (embedding, loss) =
            (p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split);
        if p.pipeline_partition.0 != PartitionMethod::Uniform {
            given.push(("pipeline_partition", Self::Method(p.pipeline_partition.0.clone())));
        }
        if first.or(last).is_some() {
            let key = if first.is_some() {
                "decoder_first_pipeline_num_layers"
            } else {
                "decoder_last_pipeline_num_layers"
            };
            given.push((key, Self::Ends { first, last }));
        }
        if embedding || loss {
            let key = match embedding {
                true => "account_for_embedding_in_pipeline_split",
                false => "account_for_loss_in_pipeline_split",
            };
            given.push((key, Self::Counted { embedding, loss }));
        }
        if let Some(text) = &p.pipeline_model_parallel_layout {
            let cited = origins.cite("pipeline_model_parallel_layout", text);
            let sizes = layout(text).map_err(|why| Error::usage(format!("{cited}: {why}")))?;
            given.push(("pipeline_model_parallel_layout", Self::Layout(cited, sizes)));
        }
        let keys: Vec<_> = given.iter().map(|(key, _)| *key).collect();
        match keys.as_slice() {
            [first, second, ..] => Err(Error::usage(format!(
                "{first} ({}) and {second} ({}) both distribute layers over stages; give only one",
                origins.of(first).unwrap_or("?"),
                origins.of(second).unwrap_or("?")
            ))),
            _ => Ok(given.pop().map_or(Self::Method(PartitionMethod::Uniform), |(_, split)| split)),
        }
    }

    /// v and the setting that gives it, if that is a pipeline layout.
    ///
    /// # Errors
    /// If the number of its stages is not a multiple of `pp`.
    pub fn virtual_stages(&self, pp: usize, origins: &Origins) -> Result<Option<(usize, String)>> {
        let Self::Layout(cited, sizes) = self else { return Ok(None) };
        if pp == 0 || !sizes.len().is_multiple_of(pp) {
            return Err(Error::usage(format!(
                "{cited} has {} stages, which must be a multiple of {}",
                sizes.len(),
                origins.cite("pipeline_model_parallel_size", pp)
            )));
        }
        Ok(Some((sizes.len() / pp, cited.clone())))
    }

    /// The parts besides layers that count as layers.
    pub fn counted_beside(&self) -> usize {
        match self {
            Self::Counted { embedding, loss } => usize::from(*embedding) + usize::from(*loss),
            _ => 0,
        }
    }

    /// The layers of each of pp · v virtual stages.
    ///
    /// # Errors
    /// If the layers cannot be shared evenly.
    pub fn partition(
        self,
        layers: usize,
        pp: usize,
        v: usize,
        origins: &Origins,
    ) -> Result<PartitionMethod> {
        let stages = pp.saturating_mul(v);
        let sizes = match self {
            Self::Method(method) => return Ok(method),
            _ if stages <= 1 || stages > MOST => return Ok(PartitionMethod::Uniform),
            Self::Layout(_, sizes) => sizes,
            Self::Counted { embedding, loss } => {
                let (embedding, loss) = (usize::from(embedding), usize::from(loss));
                let all = layers.saturating_add(embedding + loss);
                if !all.is_multiple_of(stages) || all / stages < embedding.max(loss) {
                    return Err(Error::usage(format!(
                        "{} and the parts counted as layers make {all}, which must be a multiple \
                         of {stages} ({} · {v} virtual stages each)",
                        origins.cite("num_layers", layers),
                        origins.cite("pipeline_model_parallel_size", pp)
                    )));
                }
                let mut sizes = vec![all / stages; stages];
                sizes[0] -= embedding;
                sizes[stages - 1] -= loss;
                sizes
            }
            Self::Ends { first, last } => ends(first, last, layers, pp, v, origins)?,
        };
        Ok(PartitionMethod::Explicit(sizes))
    }
}

/// `first` and `last` layers on the end stages, the rest evenly on the others. The layers of a
/// stage are split evenly over its virtual stages.
fn ends(
    first: Option<usize>,
    last: Option<usize>,
    layers: usize,
    pp: usize,
    v: usize,
    origins: &Origins,
) -> Result<Vec<usize>> {
    let keys =
        [("decoder_first_pipeline_num_layers", first), ("decoder_last_pipeline_num_layers", last)];
    let cited: Vec<String> =
        keys.iter().filter_map(|(key, size)| Some(origins.cite(key, (*size)?))).collect();
    let wrong = |what: String| {
        Error::usage(format!(
            "{}: {what} ({}, {}, {v} virtual stages each)",
            cited.join(" and "),
            origins.cite("num_layers", layers),
            origins.cite("pipeline_model_parallel_size", pp)
        ))
    };
    let others = pp.saturating_sub(cited.len());
    let named = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
    let rest = layers
        .checked_sub(named)
        .ok_or_else(|| wrong(format!("{named} layers are more than the model has")))?;
    let each = match (others, rest) {
        (0, 0) => 0,
        (others, rest) if others > 0 && rest.is_multiple_of(others) => rest / others,
        _ => {
            return Err(wrong(format!(
                "{rest} layers are left, which do not divide evenly among {others} other stages"
            )));
        }
    };
    let mut of_stages = vec![each; pp];
    of_stages[0] = first.unwrap_or(each);
    of_stages[pp - 1] = last.unwrap_or(each);
    if let Some(odd) = of_stages.iter().find(|size| !size.is_multiple_of(v)) {
        return Err(wrong(format!(
            "the {odd} layers of a stage do not divide evenly among its virtual stages"
        )));
    }
    Ok((0..pp * v).map(|stage| of_stages[stage % pp] / v).collect())
}

/// The layers of each stage of a layout such as `Et*2|(tt|)*6L`: E is the embedding, t a layer, L
/// the loss, `|` separates stages, `*` repeats the letter or parenthesis before it, commas are
/// ignored.
fn layout(text: &str) -> std::result::Result<Vec<usize>, String> {
    let letters: Vec<char> = text.chars().filter(|c| !c.is_whitespace() && *c != ',').collect();
    let mut at = 0;
    let flat = group(&letters, &mut at, 0)?;
    if at < letters.len() {
        return Err("a closing parenthesis has no opening one".to_string());
    }
    let stages: Vec<&str> = flat.split('|').collect();
    let count = |letter: char| flat.matches(letter).count();
    if count('m') > 0 {
        return Err("multi-token prediction (m) is not supported".to_string());
    }
    if (count('E'), count('L')) != (1, 1) || !flat.starts_with('E') || !flat.ends_with('L') {
        return Err(
            "it must begin with its only embedding, E, and end with its only loss, L".to_string()
        );
    }
    Ok(stages.iter().map(|stage| stage.matches('t').count()).collect())
}

/// Expands the text up to the end or a closing parenthesis.
fn group(letters: &[char], at: &mut usize, depth: usize) -> std::result::Result<String, String> {
    let mut flat = String::new();
    while let Some(&letter) = letters.get(*at) {
        let item = match letter {
            ')' => return Ok(flat),
            '(' if depth < 16 => {
                *at += 1;
                let inner = group(letters, at, depth + 1)?;
                if letters.get(*at) != Some(&')') {
                    return Err("a parenthesis is not closed".to_string());
                }
                inner
            }
            'E' | 't' | 'm' | 'L' | '|' => letter.to_string(),
            other => return Err(format!("{other:?} is not one of E, t, m, L, |, ( ) and *")),
        };
        *at += 1;
        let times = repeats(letters, at)?;
        if flat.len().saturating_add(item.len().saturating_mul(times)) > MOST {
            return Err("it has too many stages and layers".to_string());
        }
        flat.push_str(&item.repeat(times));
    }
    Ok(flat)
}

/// The number of `*N`, or 1.
fn repeats(letters: &[char], at: &mut usize) -> std::result::Result<usize, String> {
    if letters.get(*at) != Some(&'*') {
        return Ok(1);
    }
    let digits: String = letters[*at + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
    *at += 1 + digits.len();
    digits.parse().map_err(|_| "a number must follow *".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_read_as_megatron_writes_them() {
        let cases: [(&str, &[usize]); 4] = [
            ("Et*3|(tt|)*6L", &[3, 2, 2, 2, 2, 2, 2, 0]),
            ("E|t*2,t|tL", &[0, 3, 1]),
            ("EttL", &[2]),
            ("E(t|)*3(tt|)*2L", &[1, 1, 1, 2, 2, 0]),
        ];
        for (text, sizes) in cases {
            assert_eq!(layout(text).unwrap(), sizes, "{text}");
        }
    }

    #[test]
    fn layouts_that_cannot_be_are_refused_with_the_reason() {
        let deep = format!("{}E", "(".repeat(1000));
        let cases = [
            ("Et*2|(tt|)*5t|tmL", "multi-token prediction"),
            ("t|tL", "must begin with"),
            ("Et|t", "must begin with"),
            ("EtL|t", "must begin with"),
            ("E(t|L", "not closed"),
            ("Et)|L", "no opening one"),
            ("Et*|L", "a number must follow"),
            ("Ex|L", "'x' is not one of"),
            ("E((t*9999)*9999)*9999|L", "too many stages"),
            (deep.as_str(), "is not one of"),
        ];
        for (text, why) in cases {
            let message = layout(text).unwrap_err();
            assert!(message.contains(why), "{text}: {message}");
        }
    }

    fn sizes(
        split: Split,
        layers: usize,
        pp: usize,
        v: usize,
    ) -> std::result::Result<Vec<usize>, String> {
        match split.partition(layers, pp, v, &Origins::default()) {
            Ok(PartitionMethod::Explicit(sizes)) => Ok(sizes),
            Ok(_) => Ok(Vec::new()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn ends_have_what_they_were_given_and_the_others_share_the_rest() {
        let ends = |first, last| Split::Ends { first, last };
        assert_eq!(sizes(ends(Some(2), Some(2)), 12, 4, 1).unwrap(), [2, 4, 4, 2]);
        assert_eq!(sizes(ends(Some(2), None), 8, 3, 1).unwrap(), [2, 3, 3]);
        assert_eq!(sizes(ends(None, Some(2)), 10, 3, 2).unwrap(), [2, 2, 1, 2, 2, 1]);
        assert!(sizes(ends(Some(2), Some(2)), 2, 1, 1).unwrap().is_empty());
        assert!(
            sizes(ends(Some(2), Some(2)), 3, 2, 1).unwrap_err().contains("more than the model has")
        );
        assert!(sizes(ends(Some(2), Some(2)), 11, 4, 1).unwrap_err().contains("7 layers are left"));
        assert!(
            sizes(ends(Some(3), None), 7, 2, 2).unwrap_err().contains("the 3 layers of a stage")
        );
    }

    #[test]
    fn what_counts_as_a_layer_takes_a_layers_place() {
        let counted = |embedding, loss| Split::Counted { embedding, loss };
        assert_eq!(sizes(counted(true, true), 6, 4, 2).unwrap(), [0, 1, 1, 1, 1, 1, 1, 0]);
        assert_eq!(sizes(counted(false, true), 7, 4, 1).unwrap(), [2, 2, 2, 1]);
        assert!(sizes(counted(true, false), 8, 4, 1).unwrap_err().contains("a multiple of 4"));
    }
}
