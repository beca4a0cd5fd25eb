/* Added to the search worker by docs/_site/hooks.py.

The worker looks for words that begin with what the reader typed. So it finds "GPUs" for "gpu", and not "GPU" for "GPUs"
or "export" for "exporting". Here a typed word is cut to where lunr's English stemmer leaves it as it was. Words such as
"while", and words of one or two letters, are looked for as they are: "Ctrl-C" does not mean "clip". */
const typed = lunr.Query.prototype.clause;
lunr.Query.prototype.clause = function (clause) {
  const word = String(clause.term).replace(/\*$/, "");
  if (/^\d/.test(word)) clause.presence = lunr.Query.presence.OPTIONAL; // "kill -9" does not mean pages without a 9
  if (word !== String(clause.term) && (word.length < 3 || !lunr.stopWordFilter(word))) clause.term = word;
  else if (word !== String(clause.term) && !word.includes("*")) {
    const stem = lunr.stemmer(new lunr.Token(word)).toString();
    let length = 0;
    while (length < stem.length && stem[length] === word[length]) length += 1;
    if (length >= 3) clause.term = word.slice(0, length) + "*";
  }
  return typed.call(this, clause);
};
