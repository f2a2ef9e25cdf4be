//! The values that two forms both allow, and the forms that are left when everything is known.

use super::distinct;
use super::form::{Form, List, Object, Schema};
use super::refusal::Refusal;
use super::text::{Pattern, may_match};

/// Forms that are put together for one schema, at most.
const MOST_WORK: usize = 50_000;
const DEEPEST: usize = 64;
/// Optional properties that may be counted: every choice of them is an alternative.
const MOST_COUNTED: usize = 6;

/// What references name, as far as it is known.
#[derive(Default)]
pub struct Definitions {
    pub forms: Vec<Option<Form>>,
    work: usize,
}

impl Definitions {
    /// Bounds the work that a schema may cause.
    pub fn spend(&mut self, depth: usize) -> Result<(), Refusal> {
        self.work += 1;
        match self.work > MOST_WORK || depth > DEEPEST {
            true => Err(Refusal::new("schema", "is too large or too deep, with its references and alternatives")),
            false => Ok(()),
        }
    }

    fn resolve(&self, index: usize) -> Result<Form, Refusal> {
        let reason = "refers to a schema that it is part of, beside other keywords: that is not supported";
        self.forms.get(index).cloned().flatten().ok_or_else(|| Refusal::new("$ref", reason))
    }

    pub fn meet(&mut self, one: Form, other: Form, depth: usize) -> Result<Form, Refusal> {
        self.spend(depth)?;
        let depth = depth + 1;
        match (one, other) {
            (Form::Any, form) | (form, Form::Any) => Ok(form),
            (Form::Nothing(keyword), _) | (_, Form::Nothing(keyword)) => Ok(Form::Nothing(keyword)),
            (Form::Refer(one), Form::Refer(other)) if one == other => Ok(Form::Refer(one)),
            (Form::Refer(index), other) => self.meet(self.resolve(index)?, other, depth),
            (one, Form::Refer(index)) => self.meet(one, self.resolve(index)?, depth),
            (Form::Either(forms), other) => {
                let met: Result<Vec<Form>, Refusal> =
                    forms.into_iter().map(|form| self.meet(form, other.clone(), depth)).collect();
                Ok(Form::either(met?))
            }
            (one, Form::Either(forms)) => {
                let met: Result<Vec<Form>, Refusal> =
                    forms.into_iter().map(|form| self.meet(one.clone(), form, depth)).collect();
                Ok(Form::either(met?))
            }
            (Form::Null, Form::Null) => Ok(Form::Null),
            (Form::Boolean(one), Form::Boolean(other)) => Ok(match (one, other) {
                (Some(one), Some(other)) if one != other => Form::Nothing("const".into()),
                (one, other) => Form::Boolean(one.or(other)),
            }),
            (Form::Number(one), Form::Number(other)) => one.meet(other),
            (Form::Text(one), Form::Text(other)) => Ok(one.meet(other)),
            (Form::List(one), Form::List(other)) => self.meet_lists(one, other, depth),
            (Form::Object(one), Form::Object(other)) => self.meet_objects(one, other, depth),
            _ => Ok(Form::Nothing("type".into())),
        }
    }

    /// Whether no value follows both. Not certain of what goes too deep: then it says no.
    pub fn excludes(&mut self, one: &Form, other: &Form, depth: usize) -> Result<bool, Refusal> {
        if depth > DEEPEST / 2 {
            return Ok(false);
        }
        self.spend(depth)?;
        let depth = depth + 1;
        Ok(match (one, other) {
            (Form::Nothing(_), _) | (_, Form::Nothing(_)) => true,
            (Form::Any, _) | (_, Form::Any) => false,
            (Form::Refer(one), Form::Refer(other)) if one == other => false,
            (Form::Refer(index), form) | (form, Form::Refer(index)) => {
                match self.forms.get(*index).cloned().flatten() {
                    None => false,
                    Some(referred) => self.excludes(&referred, form, depth)?,
                }
            }
            (Form::Either(forms), other) | (other, Form::Either(forms)) => {
                for form in forms {
                    if !self.excludes(form, other, depth)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Form::List(one), Form::List(other)) => {
                let at = |list: &List, index: usize| list.first.get(index).unwrap_or(&list.rest).clone();
                let least = one.least.max(other.least);
                let items = (least as usize).min(one.first.len().max(other.first.len()) + 1);
                for index in 0..items {
                    if self.excludes(&at(one, index), &at(other, index), depth)? {
                        return Ok(true);
                    }
                }
                [one.most, other.most].into_iter().flatten().any(|most| most < least)
            }
            (Form::Object(one), Form::Object(other)) => {
                for name in one.required.union(&other.required) {
                    let (a, b) = (self.of_name(one, name, depth)?, self.of_name(other, name, depth)?);
                    if self.excludes(&a, &b, depth)? {
                        return Ok(true);
                    }
                }
                let least = one.least.max(other.least);
                [one.most, other.most].into_iter().flatten().any(|most| most < least)
            }
            (one, other) => self.meet(one.clone(), other.clone(), depth)?.is_nothing(),
        })
    }

    fn meet_lists(&mut self, one: List, other: List, depth: usize) -> Result<Form, Refusal> {
        let at = |list: &List, index: usize| list.first.get(index).unwrap_or(&list.rest).clone();
        let first = (0..one.first.len().max(other.first.len()))
            .map(|index| self.meet(at(&one, index), at(&other, index), depth))
            .collect::<Result<_, _>>()?;
        Ok(settle_list(List {
            first,
            rest: Box::new(self.meet(*one.rest, *other.rest, depth)?),
            least: one.least.max(other.least),
            most: [one.most, other.most].into_iter().flatten().min(),
            distinct: one.distinct || other.distinct,
        }))
    }

    /// What an object says of a name.
    pub fn of_name(&mut self, object: &Object, name: &str, depth: usize) -> Result<Form, Refusal> {
        if let Some(form) = object.property(name) {
            return Ok(form.clone());
        }
        object.patterns.iter().try_for_each(|_| self.spend(depth))?;
        let matching: Vec<&Form> =
            object.patterns.iter().filter(|(pattern, _)| pattern.matches(name)).map(|(_, form)| form).collect();
        match matching.is_empty() {
            true => Ok((*object.others).clone()),
            false => matching.into_iter().try_fold(Form::Any, |met, form| self.meet(met, form.clone(), depth)),
        }
    }

    fn meet_objects(&mut self, one: Object, other: Object, depth: usize) -> Result<Form, Refusal> {
        let mut properties = Vec::new();
        for (name, form) in &one.properties {
            let also = self.of_name(&other, name, depth)?;
            properties.push((name.clone(), self.meet(form.clone(), also, depth)?));
        }
        for (name, form) in &other.properties {
            if one.property(name).is_none() {
                let also = self.of_name(&one, name, depth)?;
                properties.push((name.clone(), self.meet(also, form.clone(), depth)?));
            }
        }
        let mut patterns: Vec<(Pattern, Form)> = Vec::new();
        for (mine, theirs) in [(&one, &other), (&other, &one)] {
            for (pattern, form) in &mine.patterns {
                if patterns.iter().any(|(known, _)| known == pattern) {
                    continue;
                }
                let also = theirs.patterns.iter().find(|(other, _)| other == pattern).map(|(_, form)| form);
                let also = also.unwrap_or(&theirs.others).clone();
                patterns.push((pattern.clone(), self.meet(form.clone(), also, depth)?));
            }
        }
        let object = Object {
            properties,
            patterns,
            others: Box::new(self.meet(*one.others, *other.others, depth)?),
            speaks_of_others: one.speaks_of_others || other.speaks_of_others,
            required: one.required.into_iter().chain(other.required).collect(),
            least: one.least.max(other.least),
            most: [one.most, other.most].into_iter().flatten().min(),
        };
        self.settle_object(object, depth)
    }

    /// An object whose patterns exclude each other, and whose properties say all that is said of their names.
    pub fn settle_object(&mut self, mut object: Object, depth: usize) -> Result<Form, Refusal> {
        for (index, (one, _)) in object.patterns.iter().enumerate() {
            (0..index).try_for_each(|_| self.spend(depth))?;
            if object.patterns[..index].iter().any(|(other, _)| may_match(&[one.clone(), other.clone()], 0, None)) {
                let reason = "has patterns that match the same names: that is not supported";
                return Err(Refusal::new("patternProperties", reason));
            }
        }
        for name in object.required.clone() {
            if object.property(&name).is_none() {
                let form = self.of_name(&object, &name, depth)?;
                object.properties.push((name, form));
            }
        }
        Ok(check_object(object))
    }
}

/// An object, or nothing where none could be one.
fn check_object(mut object: Object) -> Form {
    let required = object.required.len() as u64;
    for name in &object.required {
        if let Some(Form::Nothing(keyword)) = object.property(name) {
            return Form::Nothing(keyword.clone());
        }
    }
    if object.most.is_some_and(|most| most < required.max(object.least)) {
        return Form::Nothing("maxProperties".into());
    }
    let possible = object.properties.iter().filter(|(_, form)| !form.is_nothing()).count() as u64;
    if !object.is_open() {
        if object.least > possible {
            return Form::Nothing("minProperties".into());
        }
        object.most = object.most.filter(|most| *most < possible);
    }
    if object.least <= required {
        object.least = 0;
    }
    Form::Object(object)
}

/// A list as long as its items allow, or nothing.
pub fn settle_list(mut list: List) -> Form {
    let mut keyword = "minItems".to_owned();
    let items = list.first.iter().chain([&*list.rest]);
    // An item that cannot be ends the list before it.
    if let Some((at, Form::Nothing(found))) = items.enumerate().find(|(_, form)| form.is_nothing()) {
        list.most = Some(list.most.map_or(at as u64, |most| most.min(at as u64)));
        keyword.clone_from(found);
    }
    if let Some(most) = list.most {
        if list.least > most {
            return Form::Nothing(keyword);
        }
        list.first.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        if list.first.len() as u64 == most {
            list.rest = Box::new(Form::Nothing("maxItems".into()));
        }
    }
    Form::List(list)
}

/// Makes a schema of forms that are all known: what refers to nothing that ends is nothing, and counted properties are
/// alternatives.
pub fn settle(form: Form, definitions: Definitions) -> Result<Schema, Refusal> {
    let mut forms: Vec<Form> = definitions.forms.into_iter().map(|form| form.unwrap_or(Form::Any)).collect();
    loop {
        let ends = ending(&forms);
        let settled: Vec<Form> =
            forms.iter().map(|form| prune(form.clone(), &ends, &forms)).collect::<Result<_, Refusal>>()?;
        if settled == forms {
            return Ok(Schema { form: prune(form, &ends, &forms)?, defined: forms });
        }
        forms = settled;
    }
}

/// Which definitions have a value that ends.
fn ending(forms: &[Form]) -> Vec<bool> {
    fn ends(form: &Form, known: &[bool]) -> bool {
        match form {
            Form::Nothing(_) => false,
            Form::Refer(index) => known[*index],
            Form::Either(forms) => forms.iter().any(|form| ends(form, known)),
            Form::List(list) => {
                let (first, least) = (list.first.len() as u64, list.least);
                list.first.iter().take(least as usize).all(|form| ends(form, known))
                    && (least <= first || ends(&list.rest, known))
            }
            Form::Object(object) => {
                let listed = object.properties.iter().filter(|(name, _)| object.required.contains(name));
                let others = object.patterns.iter().map(|(_, form)| form).chain([&*object.others]);
                listed.map(|(_, form)| form).all(|form| ends(form, known))
                    && (!object.counts_others() || others.into_iter().any(|form| ends(form, known)))
            }
            _ => true,
        }
    }
    let mut known = vec![false; forms.len()];
    loop {
        let next: Vec<bool> = forms.iter().map(|form| ends(form, &known)).collect();
        if next == known {
            return known;
        }
        known = next;
    }
}

/// Without references to what never ends, and without counts that a grammar cannot take.
fn prune(form: Form, ends: &[bool], forms: &[Form]) -> Result<Form, Refusal> {
    Ok(match form {
        Form::Refer(index) if !ends[index] => Form::Nothing("$ref".into()),
        Form::Either(all) => {
            Form::either(all.into_iter().map(|form| prune(form, ends, forms)).collect::<Result<_, _>>()?)
        }
        Form::List(list) => {
            let list = List {
                first: list.first.into_iter().map(|form| prune(form, ends, forms)).collect::<Result<_, _>>()?,
                rest: Box::new(prune(*list.rest, ends, forms)?),
                ..list
            };
            // No more items than there are values that differ.
            let values = if list.distinct { distinct::values(&list.rest, forms, 0) } else { None };
            let count = values.map(|values| (values.len() + list.first.len()) as u64);
            match count.filter(|count| list.least > *count) {
                Some(_) => Form::Nothing("uniqueItems".into()),
                None => settle_list(List { most: [list.most, count].into_iter().flatten().min(), ..list }),
            }
        }
        Form::Object(object) => {
            let properties = object.properties.into_iter().map(|(name, form)| Ok((name, prune(form, ends, forms)?)));
            let patterns = object.patterns.into_iter().map(|(pattern, form)| Ok((pattern, prune(form, ends, forms)?)));
            let object = Object {
                properties: properties.collect::<Result<_, Refusal>>()?,
                patterns: patterns.collect::<Result<_, Refusal>>()?,
                others: Box::new(prune(*object.others, ends, forms)?),
                ..object
            };
            match check_object(object) {
                Form::Object(object) => count(object)?,
                form => form,
            }
        }
        form => form,
    })
}

/// A grammar counts what comes, so what may be left out is an alternative each.
fn count(object: Object) -> Result<Form, Refusal> {
    let optional: Vec<usize> = (0..object.properties.len())
        .filter(|at| {
            let (name, form) = &object.properties[*at];
            !object.required.contains(name) && !form.is_nothing()
        })
        .collect();
    if optional.is_empty() || (object.least == 0 && object.most.is_none()) {
        return Ok(Form::Object(object));
    }
    if optional.len() > MOST_COUNTED {
        let keyword = if object.least > 0 { "minProperties" } else { "maxProperties" };
        let reason = format!("is supported where at most {MOST_COUNTED} properties are optional");
        return Err(Refusal::new(keyword, reason));
    }
    let choices = (0..1usize << optional.len()).rev().map(|chosen| {
        let mut choice = object.clone();
        for (bit, at) in optional.iter().enumerate() {
            let (name, form) = &mut choice.properties[*at];
            match chosen >> bit & 1 {
                1 => _ = choice.required.insert(name.clone()),
                _ => *form = Form::Nothing("maxProperties".into()),
            }
        }
        check_object(choice)
    });
    Ok(Form::either(choices.collect()))
}
